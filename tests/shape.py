"""The shape of ds_distill: what lies in which room, and which rooms may import which.

    python tests/shape.py

Prints the lines of each room, from the top to the bottom, and ends with 1 for an import that runs
up, files of a room that import each other, a file of more than
MOST_LINES lines, a function of more than MOST_LINES_OF_A_FUNCTION, or a command that imports torch
and should not. Imports inside functions and under TYPE_CHECKING count. Part of `make lint`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "ds_distill"
KERNELS = ROOT.parent / "kernels" / "ds_kernels"
"""A package of its own, without rooms: its files and functions have the same limits."""

ROOMS = (
    *("__main__", "cli", "profiling", "export", "sweep", "__init__", "one_call", "init", "launch"),
    "phases",
    *("caching", "predictors", "training", "run", "planning", "reporting", "tasks", "check"),
    *("engine", "models", "losses", "routing", "evaluation", "data", "cache"),
    *("seen", "types", "distributions", "reads", "views", "keys"),
    *("records", "parts", "recipe", "process", "tables", "files", "errors"),
)
"""Folders and files of ds_distill from the top to the bottom: each imports what comes behind it."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 60

WITHOUT_TORCH = (["--help"], ["recipes"], ["check", "quickstart"])


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(module: str) -> str:
    """ds_distill.data.keys -> data."""
    name = module.split(".")[1]
    known = (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()
    return name if known else "__init__"


def imported(tree: ast.AST, names: bool = False) -> Iterator[tuple[str, int]]:
    """(module of ds_distill, line) of each import. names: with the name that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ds_distill":
            for alias in node.names:
                yield f"ds_distill.{alias.name}", node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_distill."):
            for alias in node.names if names else node.names[:1]:
                yield f"{node.module}.{alias.name}" if names else str(node.module), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("ds_distill."):
                    yield alias.name, node.lineno


def too_long(path: Path, name: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > MOST_LINES:
        yield f"{name}: {lines} lines, and {MOST_LINES} are the most"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines"


def mistakes() -> Iterator[str]:
    for path in sorted(KERNELS.rglob("*.py")):
        yield from too_long(path, path.relative_to(KERNELS.parent))
    for path in files():
        relative = path.relative_to(ROOT)
        own = relative.parts[0].removesuffix(".py")
        yield from too_long(path, relative)
        for module, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            other = room_of(module)
            if other not in ROOMS or own not in ROOMS:
                yield f"{relative}:{line}: {own} or {other} is in no list of rooms"
            elif ROOMS.index(other) < ROOMS.index(own):
                yield f"{relative}:{line}: {own} imports {module}, which is above it"


def circles() -> Iterator[str]:
    """Files of one room that import each other."""
    paths = {module_of(path): path for path in files() if path.parent != ROOT}
    rooms: dict[str, dict[str, set[str]]] = {}
    for own, path in paths.items():
        named = imported(ast.parse(path.read_text(encoding="utf-8")), names=True)
        others = {one if one in paths else one.rpartition(".")[0] for one, _ in named}
        beside = {one for one in others & {*paths} - {own} if room_of(one) == room_of(own)}
        rooms.setdefault(room_of(own), {})[own] = beside
    for room, graph in rooms.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as circle:
            yield f"{room}: files import each other: {' <- '.join(circle.args[1])}"


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT.parent).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def imports_of(command: list[str]) -> set[str]:
    """The modules that a command has imported when it ends."""
    code = (
        "import sys, atexit; atexit.register(lambda: print('MODULES', *sys.modules)); "
        f"sys.argv = ['ds-distill', *{command!r}]; from ds_distill.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES "))
    return {*line.split()[1:]}


def main() -> int:
    lines: Counter[str] = Counter()
    for path in files():
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        lines[room] += path.read_text(encoding="utf-8").count("\n")
    for room in ROOMS:
        print(f"{room:<12} {lines[room]:>6,} lines")
    found = [*mistakes(), *circles()]
    for command in WITHOUT_TORCH:
        if "torch" in imports_of(command):
            found.append(f"ds-distill {' '.join(command)} imports torch")
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
