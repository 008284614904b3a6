"""What an expertise phase found of teachers: who knows which class, whom a policy follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_distill.reporting.by_class import shortened
from ds_distill.reporting.page import worst_and_best


@dataclass(frozen=True)
class HeatMap:
    """Shares by class and teacher, as a figure."""

    name: str
    """Of its file."""
    title: str
    teachers: list[str]
    rows: list[tuple[str, list[float | None]]]
    """(the class's name, shortened; a share of each teacher, None of a class without examples)."""
    left: int
    """Classes that it does not show."""


def heat_maps(comparison: Mapping[str, Any], measure: str) -> list[HeatMap]:
    """Of the teachers' scores, and of whom each policy follows that does not treat all examples
    alike; the chosen one first.

    comparison: as an expertise phase's record has it. measure: what its `per_class` is.
    """
    teachers = comparison["teachers"]
    best: dict[str, float | None] = {}
    for label in next(iter(teachers.values()))["per_class"]:
        values = [of["per_class"][label] for of in teachers.values()]
        best[label] = max((value for value in values if value is not None), default=None)
    shown, folded = worst_and_best(best)
    of_teachers = {
        label: {t: of["per_class"][label] for t, of in teachers.items()} for label in shown
    }
    found = [
        _map("expertise", f"{measure} of each teacher", list(teachers), of_teachers, len(folded))
    ]
    choice, policies = comparison["choice"], comparison["policies"]
    for policy in sorted(policies, key=lambda name: name != choice):
        followed = policies[policy].get("followed") or {}
        if followed:
            chosen = " (chosen)" if policy == choice else ""
            rows = {label: followed.get(label, {}) for label in shown}
            title = f"Whom {policy}{chosen} follows"
            found.append(_map(f"followed-{policy}", title, list(teachers), rows, len(folded)))
    return found


def _map(
    name: str,
    title: str,
    teachers: list[str],
    shares: Mapping[str, Mapping[str, float | None]],
    left: int,
) -> HeatMap:
    rows = [
        (shortened(label), [of.get(teacher) for teacher in teachers])
        for label, of in shares.items()
    ]
    return HeatMap(name, title, teachers, rows, left)
