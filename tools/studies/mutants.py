"""Mutants: does a test fail when a line is wrong?

    python tools/studies/covered.py --out covered.json
    python tools/studies/mutants.py --covered covered.json --out tests/results/mutants.json
    python tools/studies/mutants.py --rooms losses --seed 14 --covered covered.json --out FILE
    python tools/studies/mutants.py --only routing:3 --covered covered.json --out one.json

Draws as many mutants from each room of the package (a folder of ds_distill, its single files
together, ds_kernels) with a seed, applies each in a copy of the tree, and runs tests of `make test`
there until one fails, in a forked process that has the libraries loaded: those that run the changed
line, by covered.py. What was done before is not done again: results are merged into the file. A
mutant that survives needs a test, or a reason in mutants.yaml.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SEED, EACH = 13, 15
"""The seed, and mutants a room, of the committed results."""
MOST_SECONDS = 60
"""Of the tests that a mutant is tried by: some lines are run by thousands."""
MOST_PROCESSOR_SECONDS = 600
"""Of one process: a mutant that hangs is killed by it."""
FIRST = 5
"""Files of tests that are collected alone, before others."""
PACKAGE, KERNELS = "ds_distill", "kernels/ds_kernels"


def rooms() -> dict[str, list[str]]:
    """Room -> its files."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "files"
        found.setdefault(room, []).append(str(path.relative_to(ROOT)))
    found["kernels"] = sorted(str(p.relative_to(ROOT)) for p in (ROOT / KERNELS).glob("*.py"))
    return found


def tests_of(covered: dict[str, Any], mutant: Mutant, most: float) -> list[list[str]]:
    """Tests that run a mutant's line, else its function, else its file, up to `most` seconds.
    First those of the FIRST files of whose tests the most run it, as a file takes seconds to be
    collected; then of each other file its quickest, then the others."""
    of_lines = {int(line): tests for line, tests in covered["lines"].get(mutant.file, {}).items()}
    found: set[int] = set()
    for first, last in mutant.spans:
        found = {n for line, tests in of_lines.items() if first <= line <= last for n in tests}
        if found:
            break
    names, seconds = covered["tests"], covered["seconds"]
    of_all = Counter(name.partition("::")[0] for name in names)
    files: dict[str, list[int]] = {}
    for number in sorted(found, key=lambda number: seconds[number]):
        files.setdefault(names[number].partition("::")[0], []).append(number)
    costs = {file: covered["files"].get(file, 0.0) + seconds[own[0]] for file, own in files.items()}
    near = sorted(files, key=lambda file: (costs[file] > 5, -len(files[file]) / of_all[file]))
    rounds = [[number for file in near[:FIRST] for number in files[file]]]
    others = sorted(near[FIRST:], key=lambda file: costs[file])
    rounds.append([files[file][0] for file in others])
    rounds[1] += [number for file in others for number in files[file][1:]]
    total, begun, chosen = 0.0, set[str](), list[list[str]]()
    for numbers in rounds:
        chosen.append([])
        for number in numbers:
            file = names[number].partition("::")[0]
            cost = seconds[number] if file in begun else costs[file]
            if total and total + cost > most:
                continue
            total += cost
            begun.add(file)
            chosen[-1].append(names[number])
    return [names for names in chosen if names]


EXPLAINED = {
    (one["file"], one["before"], one["after"]): one["why"]
    for one in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
}
"""File, before and after -> why no test can tell it from the original."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    line: int
    before: str
    after: str
    spans: tuple[tuple[int, int], ...]
    """First and last lines of itself, of its statement, of its function, and of its file."""
    source: str
    """The whole file."""


# ------------------------------------------------------------------------------- mutations

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
CALLS = {
    "min": "max",
    "max": "min",
    "argmin": "argmax",
    "argmax": "argmin",
    "any": "all",
    "all": "any",
}


Change = tuple[str, Callable[[Any], ast.AST | None]]


def mutations(node: ast.AST) -> Iterator[Change]:
    """Kinds, and functions that change a copy of this node in place or return what stands
    instead."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", lambda n: ast.Constant(not n.value)
        elif isinstance(node.value, int):
            yield "constant", lambda n: ast.Constant(n.value + 1)
        elif isinstance(node.value, float):
            yield "constant", lambda n: ast.Constant(n.value * 2 if n.value else 1.0)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield "comparison", lambda n: n.ops.__setitem__(0, SWAPS[type(n.ops[0])]())
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
        yield "operator", lambda n: setattr(n, "op", SWAPS[type(n.op)]())
    elif isinstance(node, ast.UnaryOp):
        yield "operator", lambda n: n.operand
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "sorted" and len(node.args) == 1:
            yield "call", lambda n: ast.Call(ast.Name("list"), n.args, [])
        if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield "arguments", lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1])
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in CALLS:
            field = "attr" if isinstance(node.func, ast.Attribute) else "id"
            yield "call", lambda n: setattr(n.func, field, CALLS[name])
    if isinstance(node, ast.If | ast.IfExp):
        yield "condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Expr | ast.AugAssign) or (
        isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    ):
        yield "statement", lambda _: ast.Pass()


def places(tree: ast.AST) -> Iterator[tuple[Way, ast.AST]]:
    """Each node of code that runs, with the way to it: no annotation, docstring, assertion,
    message, or number of a dimension."""

    def walk(node: ast.AST, way: Way) -> Any:
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.keyword) and node.arg in ("dim", "axis"):
            return  # another number there is an error as a rule
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        yield way, node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(value, ast.AST):
                yield from walk(value, (*way, (field, None)))
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, ast.AST):
                        yield from walk(item, (*way, (field, index)))

    yield from walk(tree, ())


def at(tree: ast.AST, way: Way) -> Any:
    for field, index in way:
        value = getattr(tree, field)
        tree = value if index is None else value[index]
    return tree


def shown(tree: ast.AST, way: Way) -> int:
    """How much of a way leads to what is worth showing: enough of the line to be found."""
    depth = len(way)
    while depth and not isinstance(at(tree, way[:depth]), ast.stmt):
        if len(ast.unparse(at(tree, way[:depth]))) > 30:
            break
        depth -= 1
    return depth


Way = tuple[tuple[str, int | None], ...]
"""Of fields and places in them, from a file's tree to a node."""


def candidates(tree: ast.AST) -> dict[str, list[tuple[Way, int]]]:
    """Ways to nodes by kind of mutation, and which of a node's mutations it is."""
    found: dict[str, list[tuple[Way, int]]] = {}
    for way, node in places(tree):
        for number, (kind, _) in enumerate(mutations(node)):
            found.setdefault(kind, []).append((way, number))
    return found


def mutant_at(file: str, tree: ast.AST, way: Way, number: int) -> Mutant | None:
    """None where the mutation changes nothing."""
    other = copy.deepcopy(tree)
    target = at(other, way)
    result = list(mutations(target))[number][1](target)
    if isinstance(result, ast.AST):
        field, index = way[-1]
        parent = at(other, way[:-1])
        if index is None:
            setattr(parent, field, result)
        else:
            getattr(parent, field)[index] = result
    source = ast.unparse(ast.fix_missing_locations(other))
    if source == ast.unparse(tree):
        return None
    part = way[: shown(tree, way)]
    before, after = (ast.unparse(at(t, part)).splitlines()[0].strip() for t in (tree, other))
    around = [at(tree, way[:depth]) for depth in range(len(way), 0, -1)]
    kinds: tuple[Any, ...] = (ast.AST, ast.stmt, ast.FunctionDef)
    inner: list[Any] = [next((n for n in around if isinstance(n, kind)), None) for kind in kinds]
    if inner[-1] is None:  # it runs when the file is imported, once
        inner = []
    spans = [(node.lineno, node.end_lineno) for node in inner if hasattr(node, "lineno")]
    line = getattr(at(tree, way), "lineno", 0)
    return Mutant("", file, line, before, after, (*spans, (1, 10**6)), source)


def draw(room: str, files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """A file first, each alike, then a kind, each alike: long files and constants would be most
    of all."""
    generator = random.Random(f"{seed} {room}")
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in files}
    left = {file: candidates(tree) for file, tree in trees.items()}
    chosen: list[Mutant] = []
    while len(chosen) < count:
        file = generator.choice(files)
        kinds = [kind for kind, some in left[file].items() if some]
        if kinds:
            some = left[file][generator.choice(kinds)]
            way, number = some.pop(generator.randrange(len(some)))
            mutant = mutant_at(file, trees[file], way, number)
            chosen += [mutant] if mutant else []
    chosen.sort(key=lambda mutant: (mutant.file, mutant.line))
    return [replace(mutant, name=f"{room}:{number}") for number, mutant in enumerate(chosen)]


# --------------------------------------------------------------------------------- running


def git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, check=True, text=True)
    return done.stdout


def copied_tree(folder: Path) -> Path:
    """The tracked files and those that are new, as they stand."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, given: Sequence[str], log: Path, seconds: int) -> tuple[str, float]:
    """ "passed", or the first test that failed, or "out of time"; and processor seconds.

    given: what pytest is given. seconds: of processor time, so that a busy machine kills nothing.
    """
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        paths = [str(tree), str(tree / "kernels"), str(tree / "tests")]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        import pytest

        code = pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *given])
        os._exit(int(code))
    deadline = time.monotonic() + 20 * seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.2)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = used.ru_utime + used.ru_stime - started.ru_utime - started.ru_stime
    if os.WIFSIGNALED(status):
        return "out of time", spent
    if os.WEXITSTATUS(status) in (0, 5):  # 5: none of these tests is in the tier
        return "passed", spent
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    gone = {line.partition(f"{tree}/")[2] for line in lines if line.startswith("ERROR: not found:")}
    if gone and not any(line.startswith("ERROR ") for line in lines):
        # Of parameters that the mutant leaves out, which pytest does not name; not of a file that
        # cannot be imported.
        rest = [test for test in given if test.partition("[")[0] not in gone]
        found, more = run_tests(tree, rest, log, seconds) if rest else ("passed", 0.0)
        return found, spent + more
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed[0].split(" - ")[0] if failed else "no test could start"), spent


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="results, merged into")
    parser.add_argument("--rooms", nargs="*", default=list(rooms()), choices=list(rooms()))
    parser.add_argument("--only", nargs="*", help="names, such as routing:3")
    parser.add_argument("--each", type=int, default=EACH, help="mutants a room")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="of a mutant's tests")
    parser.add_argument("--covered", type=Path, help="what covered.py wrote")
    return parser.parse_args()


def main() -> None:
    given = arguments_given()
    files = rooms()
    mutants = [m for room in given.rooms for m in draw(room, files[room], given.each, given.seed)]
    if given.only:
        mutants = [mutant for mutant in mutants if mutant.name in given.only]
    if not given.out:
        for mutant in mutants:
            print(f"{mutant.name} {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}")
        return
    covered = json.loads(given.covered.read_text())
    for library in ("pytest", "torch", "transformers", "datasets", "hypothesis", "sklearn.metrics"):
        importlib.import_module(library)
    known = {"seed": given.seed, "mutants": {}}
    if given.out.exists():
        known = json.loads(given.out.read_text())
    if known["seed"] != given.seed:
        raise SystemExit(f"{given.out} is of seed {known['seed']}")
    known["commit"] = git("rev-parse", "--short", "HEAD").strip()
    with tempfile.TemporaryDirectory() as folder:
        tree, log = copied_tree(Path(folder) / "tree"), Path(folder) / "log"
        for mutant in mutants:
            if mutant.name in known["mutants"] and not given.only:
                continue
            known["mutants"][mutant.name] = tried(
                mutant, tests_of(covered, mutant, given.seconds), tree, log
            )
            verdicts = [entry["verdict"] for entry in known["mutants"].values()]
            known["counts"] = {name: verdicts.count(name) for name in sorted(set(verdicts))}
            given.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def tried(mutant: Mutant, rounds: list[list[str]], tree: Path, log: Path) -> dict[str, Any]:
    """The line of the results for a mutant."""
    path = tree / mutant.file
    kept = path.read_bytes()
    path.write_text(mutant.source, encoding="utf-8")
    found, seconds, tests = "passed", 0.0, 0
    for given in rounds:
        found, spent = run_tests(tree, given, log, MOST_PROCESSOR_SECONDS)
        seconds, tests = seconds + spent, tests + len(given)
        if found != "passed":
            break
    path.write_bytes(kept)
    reason = EXPLAINED.get((mutant.file, mutant.before, mutant.after))
    verdict = ("explained" if reason else "SURVIVED") if found == "passed" else "killed"
    what = f"{mutant.name} {verdict} {mutant.before} -> {mutant.after}"
    print(f"{what}: {tests} {found} {seconds:.0f}", flush=True)
    return {
        "file": mutant.file,
        "line": mutant.line,
        "before": mutant.before,
        "after": mutant.after,
        "verdict": verdict,
        "by": reason or found,
        "tests": tests,
        "processor_seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
