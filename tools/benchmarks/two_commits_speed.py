"""Seconds of a training step of two commits, by `ds-distill profile` of each in turn.

    python tools/benchmarks/two_commits_speed.py BASE --output FILE [--recipes quickstart masked-lm]
        [--overrides KEY=VALUE ...]

For a change that must not slow what does not use it. Each commit runs in a worktree of its own;
the ratio of a pair is of two runs one after the other, which of them is first changes by turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "golden"))

from two_commits import full_name, worktree  # type: ignore[import-not-found]

from ds_distill.files import read_json, write_json
from ds_distill.run.inputs import describe_environment


def steps(
    tree: Path, recipe: str, overrides: list[str], number: int, folder: Path
) -> dict[str, float]:
    """ "phase, model" -> mean seconds of a step."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "kernels"))),
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-m", "ds_distill", "profile", recipe, *overrides]
    options = ["--steps", str(number), "--folder", str(folder / "run"), "--json"]
    file = folder / "profile.json"
    done = subprocess.run(
        [*command, *options, str(file)], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stdout}{done.stderr}")
    return {f"{one['phase']}, {one['model']}": one["step"] for one in read_json(file)["trainings"]}


def compared(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Of each training the seconds of both, and head's over base's: median and all."""
    found = {}
    for name in (name for name in pairs[0][0] if name in pairs[0][1]):
        ratios = [head[name] / base[name] for base, head in pairs]
        found[name] = {
            "base": statistics.median(base[name] for base, _ in pairs),
            "head": statistics.median(head[name] for _, head in pairs),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "masked-lm"])
    parser.add_argument("--overrides", nargs="*", default=[], help="of the recipes, for both")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    commits = [full_name(arguments.base), full_name("HEAD")]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        with (
            worktree(commits[0], work / "base") as base,
            worktree(commits[1], work / "head") as head,
        ):
            for recipe in arguments.recipes:
                pairs = []
                for number in range(arguments.pairs):
                    measured = {}
                    for tree in (base, head) if number % 2 else (head, base):
                        with tempfile.TemporaryDirectory(dir=work) as folder:
                            measured[tree] = steps(
                                tree, recipe, arguments.overrides, arguments.steps, Path(folder)
                            )
                    pairs.append((measured[base], measured[head]))
                    print(recipe, number + 1, compared(pairs), flush=True)
                found[recipe] = compared(pairs)
    write_json(
        arguments.output,
        {
            "environment": describe_environment(1, "cpu"),
            "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
            "overrides": arguments.overrides,
            "base": commits[0],
            "head": commits[1],
            "seconds_per_step": found,
        },
    )


if __name__ == "__main__":
    main()
