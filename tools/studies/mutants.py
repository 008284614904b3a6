"""Mutants: does a test fail when a line is wrong?

    python tools/studies/mutants.py --out tests/results/mutants.json
    python tools/studies/mutants.py --only routing:3 --out /tmp/one.json

Draws a fixed number of mutants from each group of files with a fixed seed, applies each in a
copy of the tree, and runs the group's tests there until one fails, in a forked process that has
the libraries loaded: first those of `make test`, then those of `make test-all`. The named ones are
mistakes that once passed all tests; they die in `make test`. `--from`, `--to` run a part; results
are merged into the file. A mutant that survives needs a test, or a reason in EXPLAINED.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SEED = 13


@dataclass(frozen=True)
class Group:
    files: tuple[str, ...]
    count: int
    """Mutants drawn."""
    tests: tuple[str, ...]
    """What pytest is given."""


UNIT = "tests/unit/test_"
ROUTING = (
    *(
        "calibration",
        "comparison",
        "expertise",
        "fitting",
        "gate",
        "held_out",
        "policies",
        "router",
    ),
)
GROUPS = {
    "routing": Group(
        tuple(f"ds_distill/routing/{name}.py" for name in ROUTING),
        14,
        (f"{UNIT}gate.py", f"{UNIT}routing.py", f"{UNIT}comparison.py"),
    ),
    "losses": Group(
        tuple(f"ds_distill/losses/{name}.py" for name in ("__init__", "hidden", "logits", "term")),
        6,
        (f"{UNIT}losses.py", f"{UNIT}vocabulary_head.py"),
    ),
    "plan": Group(("ds_distill/data/schedule.py",), 8, (f"{UNIT}plan.py",)),
    "masking": Group(
        ("ds_distill/data/masking.py",), 7, (f"{UNIT}masking.py", f"{UNIT}masked_lm.py")
    ),
    "words": Group(("ds_distill/cache/schema.py",), 7, (f"{UNIT}cache.py", f"{UNIT}fidelity.py")),
    "reader": Group(
        ("ds_distill/cache/reader.py",), 4, (f"{UNIT}cache.py", f"{UNIT}cache_builds.py")
    ),
    "engine": Group(
        ("ds_distill/engine/engine.py",),
        5,
        (
            *(f"{UNIT}{name}.py" for name in ("checkpoints", "engine_modes", "masked_lm")),
            f"{UNIT}teachers_once.py",
            "tests/distributed/test_stages.py",
        ),
    ),
    "metrics": Group(
        (
            *(f"ds_distill/recipe/metrics/{name}.py" for name in ("metric", "classes", "numbers")),
            *(f"ds_distill/evaluation/{n}.py" for n in ("predictions", "bootstrap", "scores")),
        ),
        14,
        (f"{UNIT}metrics.py", f"{UNIT}bootstrap.py", f"{UNIT}regression.py"),
    ),
    "checkpoints": Group(
        ("ds_distill/training/checkpoints.py",),
        3,
        (f"{UNIT}checkpoints.py", f"{UNIT}continuing.py"),
    ),
    "kernels": Group(
        ("kernels/ds_kernels/_divergences.py", "kernels/ds_kernels/_topk.py"),
        0,
        tuple(f"tests/kernels/test_{name}.py" for name in ("edges", "ops", "interpreter")),
    ),
}

_MASKING, _PLAN = "ds_distill/data/masking.py", "ds_distill/data/schedule.py"
_STREAMS = "CHOSEN, SHOWN, RANDOM_TOKEN = "
_GATE = "ds_distill/routing/gate.py"
_POLICIES = "ds_distill/routing/policies.py"
_HELD_OUT = "ds_distill/routing/held_out.py"
_WORDS = "ds_distill/cache/schema.py"
_DIVERGENCES = "kernels/ds_kernels/_divergences.py"
_TOPK = "kernels/ds_kernels/_topk.py"
NAMED: list[tuple[str, str, str]] = [
    (_MASKING, "uniforms[CHOSEN] < masking.rate", "uniforms[CHOSEN] < masking.rate / 2"),
    (_MASKING, "uniforms[SHOWN] < 0.8", "uniforms[SHOWN] < 0.5"),
    (_MASKING, "uniforms[SHOWN] < 0.9", "uniforms[SHOWN] < 0.75"),
    (_MASKING, " & ~special &", " &"),
    (_MASKING, " & (view.attention_mask == 1)", ""),
    (_MASKING, f"{_STREAMS}201, 202, 203", f"{_STREAMS}201, 201, 203"),
    (_MASKING, f"{_STREAMS}201, 202, 203", f"{_STREAMS}201, 202, 202"),
    (_MASKING, f"{_STREAMS}201, 202, 203", f"{_STREAMS}201, 202, 201"),
    (_MASKING, "None, :], seed, epoch, purpose", "None, :], seed, 0, purpose"),
    (_MASKING, "uniform(keys[:, None, :], seed, epoch", "uniform(keys[:1, None, :], seed, epoch"),
    (_PLAN, "POOL_BATCHES = 50", "POOL_BATCHES = 5"),
    (_PLAN, "POOL_BATCHES = 50", "POOL_BATCHES = 5000"),
    (_PLAN, "SHUFFLE, SHARE = 1, 2", "SHUFFLE, SHARE = 2, 2"),
    (_PLAN, "seed, epoch, SHUFFLE, 1)", "seed, epoch, SHUFFLE)"),
    (_GATE, "(3.0, 1.0, 0.3, 0.1, 0.03)", "(3.0,)"),
    (_GATE, "(3.0, 1.0, 0.3, 0.1, 0.03)", "(0.03,)"),
    (_GATE, "BIAS_PENALTY = 1e-3", "BIAS_PENALTY = 0.0"),
    (_GATE, "BIAS_PENALTY = 1e-3", "BIAS_PENALTY = 1.0"),
    (_GATE, ".clamp(-100.0, 100.0)", ""),
    (_HELD_OUT, "folds_of(group_keys, seed, HELD_OUT)", "folds_of(group_keys, seed)"),
    (_POLICIES, "in sorted(inputs.logits)", "in list(inputs.logits)"),
    (_WORDS, "logits.float() / self.temperature", "logits.float()"),
    (_WORDS, "self._codec, self.temperature)", "self._codec, 1.0)"),
    (_DIVERGENCES, "_NEAR = 16.0", "_NEAR = 1000.0"),
    (_DIVERGENCES, "near = gap.abs() < 1", "near = gap.abs() < 1000"),
    (_DIVERGENCES, "tl.abs(apart) < 1, close", "tl.abs(apart) < 1000, close"),
    (_DIVERGENCES, "torch.where(x < 1,", "torch.where(x < 100,"),
    (_DIVERGENCES, "tl.where(tl.abs(x) < 0.5, p", "tl.where(tl.abs(x) < 50.0, p"),
    (_TOPK, 'tl.where(once, loss, float("inf"))', "loss"),
]
"""File, old text, new text."""

EXPLAINED: dict[str, str] = {
    "ds_distill/data/schedule.py: uniform(keys, SHARE).numpy() >= share -> "
    "uniform(keys, SHARE).numpy() > share": "a draw of 53 bits equals the share once in 2^53",
    "ds_distill/losses/logits.py: self._weight / len(heads[0].bias) -> "
    "self._weight / len(heads[1].bias)": "linear_mse refuses heads of unlike vocabularies",
    "ds_distill/engine/engine.py: state['device'] = torch.cuda.get_rng_state(device) -> pass": (
        "not equivalent, and not killed here: the line runs on a GPU alone"
    ),
    "ds_distill/engine/engine.py: torch.isfinite(parts[name]).all() -> "
    "torch.isfinite(parts[name]).any()": "each loss is one number",
    "ds_distill/routing/gate.py: loss = 0.0 -> loss = 1.0": (
        "penalties are compared with each other alone, and each has it"
    ),
    "ds_distill/losses/logits.py: 1 << 25 -> 1 << 26": (
        "a bound on memory; losses are equal at any"
    ),
}
"""`file: before -> after`: why no test can tell it from the original."""


@dataclass(frozen=True)
class Mutant:
    name: str
    group: str
    file: str
    line: int
    before: str
    after: str
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


def places(tree: ast.AST) -> Iterator[tuple[tuple[tuple[str, int | None], ...], ast.AST]]:
    """Each node of code that runs, with the way to it: no annotation, docstring, assertion,
    message, or number of a dimension."""

    def walk(node: ast.AST, way: tuple[tuple[str, int | None], ...]) -> Any:
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


def at(tree: ast.AST, way: tuple[tuple[str, int | None], ...]) -> Any:
    for field, index in way:
        value = getattr(tree, field)
        tree = value if index is None else value[index]
    return tree


def shown(tree: ast.AST, way: tuple[tuple[str, int | None], ...]) -> int:
    """How much of a way leads to what is worth showing: enough of the line to be found."""
    depth = len(way)
    while depth and not isinstance(at(tree, way[:depth]), ast.stmt):
        if len(ast.unparse(at(tree, way[:depth]))) > 30:
            break
        depth -= 1
    return depth


def candidates(group: str) -> dict[str, list[Mutant]]:
    """All mutants of a group by kind, in the order of its files and lines."""
    found: dict[str, list[Mutant]] = {}
    for file in GROUPS[group].files:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        original = ast.unparse(tree)
        for way, node in places(tree):
            for number, (kind, _) in enumerate(mutations(node)):
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
                if source == original:
                    continue
                part = way[: shown(tree, way)]
                before, after = (
                    ast.unparse(at(t, part)).splitlines()[0].strip() for t in (tree, other)
                )
                line = getattr(node, "lineno", 0)
                found.setdefault(kind, []).append(
                    Mutant("", group, file, line, before, after, source)
                )
    return found


def draw(group: str) -> list[Mutant]:
    """Each of a kind drawn first: constants and swapped arguments would be most of all."""
    left, chosen = candidates(group), []
    generator = random.Random(f"{SEED} {group}")
    while len(chosen) < GROUPS[group].count:
        kind = generator.choice([kind for kind, some in left.items() if some])
        chosen.append(left[kind].pop(generator.randrange(len(left[kind]))))
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line))


def drawn() -> list[Mutant]:
    """The drawn mutants of all groups, then the named."""
    mutants = [
        replace(mutant, name=f"{group}:{number}")
        for group in GROUPS
        for number, mutant in enumerate(draw(group))
    ]
    for number, (path, old, new) in enumerate(NAMED):
        group = next(name for name, settings in GROUPS.items() if path in settings.files)
        text = (ROOT / path).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{path} has {text.count(old)} times {old!r}")
        line = text[: text.index(old)].count("\n") + 1
        source = text.replace(old, new)
        mutants.append(Mutant(f"named:{number}", group, path, line, old, new, source))
    return mutants


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


TIERS = {"make test": "not further and not slow", "make test-all": "further and not slow"}
"""Targets of the Makefile, in their order, and the tests of each."""


def first_failure(tree: Path, tests: tuple[str, ...], log: Path) -> tuple[str, str, float]:
    """The target that finds a mutant or "", what `run_tests` says, and processor seconds."""
    total = 0.0
    for target, chosen in TIERS.items():
        found, spent = run_tests(tree, (*tests, "-m", chosen), log, 300)
        total += spent
        if found != "passed":
            return target, found, total
    return "", "passed", total


def run_tests(tree: Path, given: tuple[str, ...], log: Path, seconds: int) -> tuple[str, float]:
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
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed[0].split(" - ")[0] if failed else "no test could start"), spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results.json, merged into")
    parser.add_argument("--only", nargs="*", help="names, such as routing:3")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", dest="last", type=int)
    parser.add_argument("--list", action="store_true", help="print them and stop")
    arguments = parser.parse_args()
    mutants = drawn()[arguments.first : arguments.last]
    if arguments.only:
        mutants = [mutant for mutant in mutants if mutant.name in arguments.only]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name} {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}")
        return
    for library in ("pytest", "torch", "transformers", "datasets", "hypothesis", "sklearn.metrics"):
        importlib.import_module(library)
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"mutants": {}}
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(
        head, cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        tree, log = copied_tree(Path(folder) / "tree"), Path(folder) / "log"
        for mutant in mutants:
            path = tree / mutant.file
            kept = path.read_bytes()
            path.write_text(mutant.source, encoding="utf-8")
            target, found, seconds = first_failure(tree, GROUPS[mutant.group].tests, log)
            path.write_bytes(kept)
            reason = EXPLAINED.get(f"{mutant.file}: {mutant.before} -> {mutant.after}")
            verdict = ("explained" if reason else "SURVIVED") if found == "passed" else "killed"
            known["mutants"][mutant.name] = {
                "file": mutant.file,
                "line": mutant.line,
                "before": mutant.before,
                "after": mutant.after,
                "verdict": verdict,
                "by": reason or found,
                "in": target,
                "processor_seconds": round(seconds, 1),
            }
            what = f"{mutant.name} {verdict} {mutant.before} -> {mutant.after}"
            print(f"{what}: {target} {found}", flush=True)
            verdicts = [entry["verdict"] for entry in known["mutants"].values()]
            known["seed"], known["commit"] = SEED, commit
            known["counts"] = {name: verdicts.count(name) for name in sorted(set(verdicts))}
            arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
