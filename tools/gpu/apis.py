"""What of torch, triton, deepspeed, transformers and the rivals the code that runs on a GPU uses.

    python tools/gpu/apis.py > tools/gpu/apis.txt     after a change of the code

A line is a dotted name, with the keywords that it is called with. Read from the source: methods of
tensors and models are not among them. `check.py` looks each of them up on the GPU machine, whose
versions are not those that the tests run on; what was looked up beforehand is in README.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).with_name("apis.txt")
FILES = (
    "ds_distill/**/*.py",
    "kernels/ds_kernels/*.py",
    "kernels/benchmarks/**/*.py",
    "tools/benchmarks/*.py",
    "tools/gpu/*.py",
    "tests/gpu/*.py",
    "tests/kernels/*.py",
)
EXPORT = ROOT / "ds_distill" / "export"
"""Not on a GPU, and its transformers is newer."""
PACKAGES = (
    "torch",
    "triton",
    "deepspeed",
    "transformers",
    "liger_kernel",
    "textbrewer",
    "flashdeberta",
)
_SHARED = {"tl": "triton.language", "triton": "triton"}
"""Names that the kernels take from a module of their own, where Triton may be missing."""


def used(files: Iterable[Path]) -> dict[str, set[str]]:
    """Dotted names of PACKAGES, and the keywords of their calls."""
    found: dict[str, set[str]] = {}
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = _imported(tree)
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for module, name in _from_imports(tree):
            found.setdefault(f"{module}.{name}", set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
                name = _dotted(node, names)
                if name:
                    found.setdefault(name, set())
            if isinstance(node, ast.Call):
                name = _dotted(node.func, names)
                if name:
                    given = {keyword.arg for keyword in node.keywords if keyword.arg}
                    found.setdefault(name, set()).update(given)
    return found


def _ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in PACKAGES


def _from_imports(tree: ast.AST) -> list[tuple[str, str]]:
    return [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _ours(node.module)
        for alias in node.names
        if node.module is not None
    ]


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local names of modules and what is in them."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _ours(alias.name):
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if node.level and alias.name in _SHARED:
                    names[alias.name] = _SHARED[alias.name]
                elif node.level == 0 and _ours(node.module):
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    name = ".".join([names[node.id], *reversed(parts)])
    return None if name.startswith("torch.ops.ds_kernels.") else name  # our own


def lines(found: dict[str, set[str]]) -> list[str]:
    return [
        f"{name}({', '.join(sorted(found[name]))})" if found[name] else name
        for name in sorted(found)
    ]


def fault(line: str) -> str:
    """Why a line of the list does not fit what is installed; "" where it does."""
    name, _, keywords = line.partition("(")
    try:
        value = resolve(name)
    except (ImportError, AttributeError) as error:
        return f"{name}: {error}"
    if name.startswith("transformers.") and name.endswith("Config"):
        return ""  # a config's signature leaves out what it inherits, and it takes any keyword
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return ""  # of compiled code, which has no signature
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    wanted = set(keywords.removesuffix(")").replace(" ", "").split(",")) - {""}
    missing = wanted - set(parameters)
    return f"{name} has no {', '.join(sorted(missing))}" if missing else ""


def resolve(name: str) -> Any:
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 1):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[: number + 1]))
            except ImportError as error:
                raise AttributeError(f"{'.'.join(parts[:number])} has no {part}") from error
        value = getattr(value, part)
    return value


def listed() -> list[str]:
    return LISTED.read_text(encoding="utf-8").splitlines()


def from_source() -> list[str]:
    files = [file for pattern in FILES for file in sorted(ROOT.glob(pattern))]
    return lines(used(file for file in files if EXPORT not in file.parents))


if __name__ == "__main__":
    print("\n".join(from_source()))
