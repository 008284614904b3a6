"""Run two commits on this machine and say whether their numbers are equal, bit for bit.

    python tests/golden/two_commits.py BASE [HEAD]

For a change that must move no number, such as a renaming. Compared are the losses of all steps,
what routing fitted and chose, metrics, every column of the caches, and all trained weights. Exits
with 1 if something differs. Each commit runs in a git worktree of its own, by its command line,
with the recipes of its own tests/golden (or with these, if it has none).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from golden import SCENARIOS
from materials import write_materials
from readings import FP16_IS_SUPPORTED, Reading, events, read_run, run, start

HERE = Path(__file__).parent
FP16 = {"enabled": True, "initial_scale_power": 8}
"""Of a run in fp16, which a CPU without it computes in software."""

MAY_DIFFER = ("cache/*/manifest.json/format", "results.json/verdict")
"""Patterns of places whose values say nothing of the numbers."""

KILLED_AFTER = 120
"""Training steps, of about 400: in the training of the second teacher."""

SHOWN = 8
"""Places that differ, of each scenario."""


def run_commit(tree: Path, folder: Path) -> dict[str, Path]:
    """Run all scenarios of a checkout: scenario -> the folder of its run."""
    own = tree / "tests" / "golden"
    recipes = {name: f"{name}.yaml" for name in SCENARIOS}
    for recipe in recipes.values():
        shutil.copy(own / recipe if (own / recipe).is_file() else HERE / recipe, folder)

    def say(what: str) -> None:
        print(f"{tree.parent.name}: {what}", file=sys.stderr, flush=True)

    say(f"{', '.join(recipes)}")
    run(tree, folder, *(["run", recipe, "--folder", f"runs/{n}"] for n, recipe in recipes.items()))
    say("fp16")
    zero1 = {"zero_optimization": {"stage": 1}, "fp16": FP16}
    (folder / "zero1_fp16.json").write_text(json.dumps(zero1))
    single_label = recipes["single-label"]
    half = ["run", single_label, "deepspeed=zero1_fp16.json", "--folder", "runs/fp16"]
    run(tree, folder, half, before=FP16_IS_SUPPORTED)
    say("two ranks at stage 3")
    dropout = "training.dropout=0.1"
    ranks = ["--num-gpus", "2", "deepspeed=zero3_fp32"]
    for name, place in (("single-label", "two-ranks"), ("words", "words-two-ranks")):
        two = [recipes[name], dropout, *ranks, "--folder", f"runs/{place}"]
        run(tree, folder, ["launch", *two])
    say("a run that is killed and resumed")
    killed = ["run", single_label, dropout, "training.save_every=4", "--folder", "runs/resumed"]
    run_until(tree, folder, killed, steps=KILLED_AFTER)
    run(tree, folder, [*killed, "--resume"])
    return {place.name: place for place in sorted((folder / "runs").iterdir())}


def run_until(tree: Path, folder: Path, command: list[str], steps: int) -> None:
    """Run a command and kill it when its run has taken so many training steps."""
    process = start(tree, folder, command)
    while process.poll() is None:
        taken = sum(event["event"] == "train" for event in events(folder / command[-1]))
        if taken >= steps:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return
        time.sleep(0.02)
    raise RuntimeError(f"{tree}: ended before it was killed\n{process.communicate()[0]}")


def differences(base: Reading, head: Reading) -> dict[str, tuple[Any, Any]]:
    """Place -> both values, where they differ or one is not there; in the order of the run."""
    found = {}
    for place in dict.fromkeys([*head, *base]):
        pair = tuple(side.get(place, "not there") for side in (base, head))
        may = place in base and place in head and any(fnmatch.fnmatch(place, p) for p in MAY_DIFFER)
        if not may and repr(pair[0]) != repr(pair[1]):  # tells -0.0 from 0.0
            found[place] = pair
    return found


def report(scenario: str, numbers: int, different: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    """How many of its numbers differ, and the first places."""
    yield f"{scenario}: {len(different)} of {numbers} differ"
    for place, (before, after) in list(different.items())[:SHOWN]:
        yield f"  {place}: {before!r}, then {after!r}"


@contextmanager
def worktree(commit: str, place: Path) -> Iterator[Path]:
    git = ["git", "-C", str(HERE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


def full_name(commit: str) -> str:
    """Raises ValueError for what is no commit."""
    command = ["git", "-C", str(HERE), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not found:
        raise ValueError(f"{commit!r} is no commit here")
    return found


def read_commit(commit: str, work: Path, materials: Path) -> dict[str, Reading]:
    """Scenario -> all numbers of a commit."""
    folder = shutil.copytree(materials, work / "here")
    with worktree(commit, work / "tree") as tree:
        runs = run_commit(tree, folder)
    for place in runs.values():
        if commit not in (place / "environment.json").read_text():
            raise RuntimeError(f"{place}: this was not run by {commit}")
    return {name: without(folder, read_run(place)) for name, place in runs.items()}


def without(folder: Path, reading: Reading) -> Reading:
    """The same numbers, wherever the runs were."""
    return {
        place: value.replace(str(folder), "") if isinstance(value, str) else value
        for place, value in reading.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument("head", metavar="HEAD", nargs="?", default="HEAD", help="another")
    arguments = parser.parse_args()
    try:
        commits = [full_name(arguments.base), full_name(arguments.head)]
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(commits)) as pool:
        work = Path(temporary)
        write_materials(work / "materials")
        sides = [work / "base", work / "head"]
        for side in sides:
            side.mkdir()
        base, head = pool.map(read_commit, commits, sides, [work / "materials"] * 2)
    compared = {name: differences(base[name], head[name]) for name in head}
    print(f"{commits[0]}, then {commits[1]}")
    for name, different in compared.items():
        print("\n".join(report(name, len(head[name]), different)))
    raise SystemExit(any(compared.values()))


if __name__ == "__main__":
    main()
