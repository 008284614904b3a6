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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from materials import write_materials
from readings import Reading, read_run, run

HERE = Path(__file__).parent
TREE = HERE.parents[1]
FILE = TREE / "tests" / "results" / "golden.json"
SCENARIOS = (
    "single-label",
    "masked-lm",
    "words",
    "regression",
    "questions",
    "spans",
    "shared-head",
    "multi-label",
    "groups",
)

Numbers = dict[str, dict[str, Any]]
"""Kind -> name -> number, or a list of them."""


@dataclass(frozen=True)
class Kind:
    """Numbers that move alike from one machine to another."""

    relative: float
    """Allowed share of the number."""
    absolute: float
    """Allowed in any case."""
    reason: str
    patterns: tuple[str, ...] = ()
    """Places in a run's reading; of the losses `numbers_of` knows the places."""


FIRST = 10
"""Losses of each training that are kept beside its last ones."""

_LOSSES = (
    "Sums are rounded in another order where the processor has other vector units. Held to SSE "
    "and to AVX2, a machine with AVX2 moved losses by at most 1.1e-5 of their value."
)
_SHARES = "Two of 240 answers, where two classes are nearly as likely. Seen: none."
KINDS = {
    "first losses": Kind(1e-4, 0.0, _LOSSES),
    "last losses": Kind(1e-3, 0.0, _LOSSES + " Every step adds to it."),
    "losses of models": Kind(
        1e-3, 0.0, _LOSSES, ("phases/*/models/*/loss", "phases/*/models/*/mse")
    ),
    "temperatures": Kind(1e-3, 0.0, _LOSSES, ("phases/*/temperatures/*",)),
    "shares": Kind(
        0.0,
        0.01,
        _SHARES,
        (
            "routing.json/policies/*/score",
            "routing.json/teachers/*/score",
            "phases/*/models/*/accuracy",
            "phases/*/models/*/macro_f1",
            "phases/*/models/*/entity_f1",
            "phases/*/models/*/squad_f1",
            "phases/*/models/*/character_f1",
            "phases/*/models/*/mrr",
            "phases/*/models/*/pearson",
        ),
    ),
    "intervals": Kind(
        0.0,
        0.02,
        "One or two answers of 120. With each text of a document as a group they lose .09 to .2.",
        tuple(
            f"{place}/{teacher}/{what}/*"
            for place, what in (
                ("routing.json/teachers", "interval"),
                ("phases/*/models", "to_baseline/interval"),
            )
            for teacher in ("reader", "answers")
        ),
    ),
    "choices": Kind(
        0.0,
        0.0,
        "The gate's target is right on 20 points more than the next one's, and so on.",
        ("routing.json/choice", "phases/*/experts/*", "results.json/student"),
    ),
}


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
        for pattern in settings.patterns:
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
            tolerance = golden["tolerances"].get(kind) or asdict(KINDS[kind])  # a new kind
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
            kind: {key: value for key, value in asdict(settings).items() if key != "patterns"}
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
