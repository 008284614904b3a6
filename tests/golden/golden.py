"""Golden numbers: losses, routing and metrics of small runs, as they have been.

    python tests/golden/golden.py            say what moved, and by how much
    python tests/golden/golden.py --write    the numbers of now become the golden ones

Names of scenarios behind it: these alone.

A number that moves on purpose is written anew in the commit that moves it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from materials import write_materials
from readings import Reading, read_run, run

HERE = Path(__file__).parent
TREE = HERE.parents[1]
FILE = TREE / "tests" / "results" / "golden.json"
SCENARIOS = (
    *("single-label", "masked-lm", "words", "regression", "questions", "spans", "shared-head"),
    *("multi-label", "groups"),
)

Numbers = dict[str, dict[str, Any]]
"""Kind -> name -> number, or a list of them."""


KINDS: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "kinds.yaml").read_text(encoding="utf-8"))
FIRST = 10
"""Losses of each training that are kept beside its last ones."""


def run_scenarios(folder: Path, names: Sequence[str] = SCENARIOS) -> dict[str, Path]:
    """Scenario -> the folder of its run."""
    write_materials(folder)
    run(
        TREE,
        folder,
        *(["run", str(HERE / f"{name}.yaml"), "--folder", f"run-{name}"] for name in names),
    )
    return {name: folder / f"run-{name}" for name in names}


def numbers_of(reading: Reading) -> Numbers:
    """What of a run is golden."""
    curves: dict[str, list[float]] = {}
    for place, value in reading.items():
        file, *way = place.split("/")
        if file == "metrics.jsonl" and len(way) == 5 and way[2] == "train":
            curves.setdefault("/".join([*way[:2], way[4]]), []).append(value)
    numbers: Numbers = {
        "first losses": {name: curve[:FIRST] for name, curve in curves.items()},
        "last losses": {name: curve[-1] for name, curve in curves.items()},
    }
    for kind, settings in KINDS.items():
        for pattern in settings["patterns"]:
            for place in fnmatch.filter(reading, pattern):
                if place.count("/") == pattern.count("/"):  # a * stands for one step
                    numbers.setdefault(kind, {})[place] = reading[place]
    return numbers


def moved(golden: dict[str, Any], found: dict[str, Numbers]) -> list[str]:
    """One line for each number of `found` that is not what the golden file says."""
    lines = []
    for scenario in sorted(golden["scenarios"].keys() | found.keys()):
        old, new = golden["scenarios"].get(scenario, {}), found.get(scenario, {})
        for kind in sorted(old.keys() | new.keys()):
            tolerance = golden["tolerances"].get(kind) or KINDS[kind]  # a new kind
            before, after = old.get(kind, {}), new.get(kind, {})
            for name in sorted(before.keys() | after.keys()):
                line = _moved(before.get(name), after.get(name), tolerance)
                if line:
                    lines.append(f"{scenario}, {kind}, {name}: {line}")
    return lines


def _moved(old: Any, new: Any, tolerance: dict[str, Any]) -> str | None:
    """How a number, a name, or a list of numbers differs; None where it does not."""
    olds, news = (value if isinstance(value, list) else [value] for value in (old, new))
    if len(olds) != len(news):
        return f"there were {len(olds)}, there are {len(news)}"
    for place, (before, after) in enumerate(zip(olds, news, strict=True)):
        was = f"the {place + 1}. was" if len(olds) > 1 else "was"
        if not (isinstance(before, float) and isinstance(after, float)):
            if before != after:
                return f"{was} {before!r}, is {after!r}"
            continue
        by, allowed = after - before, tolerance["absolute"] + tolerance["relative"] * abs(before)
        if not abs(by) <= allowed:
            return f"{was} {before:.9g}, is {after:.9g}, moved by {by:+.2g}; allowed {allowed:.2g}"
    return None


def golden_file(found: dict[str, Numbers]) -> dict[str, Any]:
    return {
        "command": "python tests/golden/golden.py --write",
        "written on": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
        },
        "tolerances": {
            kind: {key: value for key, value in settings.items() if key != "patterns"}
            for kind, settings in KINDS.items()
        },
        "scenarios": found,
    }


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each key; a list is on one line."""
    text = json.dumps(content, indent=2)
    lists = re.compile(r"\[[^\[\]{}]*\]")
    return lists.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the golden numbers with those of now.")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} anew")
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="these alone")
    given = parser.parse_args()
    names = given.names or SCENARIOS
    with tempfile.TemporaryDirectory() as folder:
        runs = run_scenarios(Path(folder), names)
        found = {name: numbers_of(read_run(place)) for name, place in runs.items()}
    golden = json.loads(FILE.read_text()) if FILE.is_file() else golden_file({})
    kept = {name: of for name, of in golden["scenarios"].items() if name not in names}
    lines = moved(golden, {**kept, **found})
    print("\n".join(lines) if lines else "No golden number moved.")
    if given.write:
        FILE.write_text(as_text(golden_file({**kept, **found})))
    elif lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
