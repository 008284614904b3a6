"""What can be known of routing before a student is trained, beside what the students then are.

    python tools/studies/routing_rule.py

From tests/results/routing.json, docs/results/quickstart*.json and docs/results/label-experts.json
it writes the table in docs/studies/routing.md: of each run the shares that a comparison prints (how
often teachers predict the same, how far a teacher that is right, where one is, is above the
average), the best target's cross-validated lead over the average, which policy that chooses, and
the lead of that policy's student over the average's on test. Nothing is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from pages import row, show

from ds_distill.files import read_json

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "studies" / "routing.md"
MARK = "before a student is trained"
QUICKSTARTS = {
    "quickstart, seed 0": "quickstart.json",
    "quickstart, seed 1": "quickstart-seed-1.json",
    "quickstart, seed 2": "quickstart-seed-2.json",
    "quickstart, wider teachers": "quickstart-wider-teachers.json",
}
"""The last is of 700 training examples of a class, 3 epochs and 64 tokens."""


@dataclass(frozen=True)
class Compared:
    """A run, whose comparison of targets was made on examples apart from test."""

    name: str
    comparison: dict[str, Any]
    policy: str
    """Whose student was compared with the average's: what was chosen, or else the gate."""
    difference: float
    """Of the two students on test."""
    interval: tuple[float, float]

    @property
    def chosen(self) -> bool:
        """Whether the comparison chooses another policy than the average."""
        return bool(self.comparison["choice"] != "average")

    @property
    def is_right(self) -> bool:
        """Whether the students say what the comparison said: another policy is chosen and its
        student is above the average's beyond chance, or the average is and it is not."""
        return (self.interval[0] > 0) == self.chosen

    def cells(self) -> list[str]:
        of = self.comparison
        [agree] = of["agreement"].values()
        any_teacher = of["any_teacher"]["score"] - of["policies"]["average"]["score"]
        target = of["policies"][self.policy]
        return [
            self.name,
            f"{agree:.0%}",
            f"{100 * any_teacher:+.1f}",
            f"{self.policy} {_points(target['difference'], target['interval'])}",
            of["choice"],
            _points(self.difference, self.interval),
            "yes" if self.is_right else "no",
        ]


def _points(difference: float, interval: Any) -> str:
    low, high = interval
    return f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def compared() -> Iterator[Compared]:
    for run in read_json(ROOT / "tests" / "results" / "routing.json")["runs"]:
        test, interval = run["test"], run["intervals"]["student of gate to student of average"]
        name = f"study, {run['set']}, seed {run['seed']}"
        lead = test["student of gate"] - test["student of average"]
        yield Compared(name, run["validation"], "gate", lead, interval)
    results = ROOT / "docs" / "results"
    for name, file in QUICKSTARTS.items():
        phases = {phase["kind"]: phase for phase in read_json(results / file)["phases"]}
        pairs = phases["evaluate"]["comparisons"]
        [pair] = [p for p in pairs if (p["student"], p["other"]) == ("gate", "average")]
        comparison = phases["expertise"]["comparison"]
        yield Compared(name, comparison, "gate", pair["difference"], pair["interval"])
    for run in read_json(results / "label-experts.json")["runs"]:
        name, pair = f"experts of labels, seed {run['seed']}", run["chosen_to_average"]
        yield Compared(name, run["targets"], run["choice"], pair["difference"], pair["interval"])


def text() -> str:
    """The page's table."""
    heads = [
        "run",
        "teachers agree",
        "any teacher, to the average",
        "target, to the average's",
        "chosen",
        "its student, to the average's",
        "as it said",
    ]
    rows = [one.cells() for one in compared()]
    right = sum(cells[-1] == "yes" for cells in rows)
    return (
        row(heads)
        + row(["---"] * len(heads))
        + "".join(map(row, rows))
        + f"\nThe students are as the comparison said in {right} of {len(rows)} runs.\n"
    )


if __name__ == "__main__":
    show(PAGE, MARK, text())
