"""A run's outcome in one sentence."""

from __future__ import annotations

from typing import Any

_OUTCOMES = ("better than", "level with", "worse than")


def verdict(results: dict[str, Any]) -> str:
    """What the shipped student is worth beside teachers and controls, with the numbers.

    Better and worse mean that the 95% interval of the difference leaves out zero.
    """
    evaluation = last_evaluation(results)
    student = results["student"]
    if student is None:
        return "No student was trained."
    if evaluation is None or student not in evaluation["models"]:
        return (
            f"The student is `{student}`. No evaluate phase comes after it, so its accuracy was "
            "not measured."
        )
    models = evaluation["models"]
    own = models[student]
    asked = (
        f"{own['tokens']:,} hidden tokens" if "tokens" in own else f"{own['examples']:,} examples"
    )
    accuracy = f"{own['accuracy']:.1%} of {asked} of {evaluation['split']}"
    outcomes = {
        row["other"]: _outcome(*row["interval"])
        for row in evaluation["comparisons"]
        if row["student"] == student
    }
    clauses = []
    for role, noun, addition in (
        ("teacher", "teacher", ""),
        ("control", "student", " without teachers"),
    ):
        others = {name: models[name] for name in outcomes if models[name]["role"] == role}
        clauses += _clauses(others, outcomes, noun, addition)
    sentence = f"The student `{student}` is right on {accuracy}"
    return f"{sentence}, {_listed(clauses)}." if clauses else f"{sentence}."


def last_evaluation(results: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the last evaluate phase, if there is one."""
    records = [record for record in results["phases"] if record["kind"] == "evaluate"]
    return records[-1] if records else None


def _clauses(
    others: dict[str, dict[str, Any]], outcomes: dict[str, str], noun: str, addition: str
) -> list[str]:
    """One clause per outcome. `both` and `all` where all others share it, else their names."""
    clauses = []
    for outcome in _OUTCOMES:
        group = {name: other for name, other in others.items() if outcomes[name] == outcome}
        if not group:
            continue
        nouns = (noun if len(group) == 1 else f"{noun}s") + addition
        if len(group) == len(others):
            amount = {1: "the", 2: "both"}.get(len(group), f"all {len(group)}")
            numbers = ", ".join(f"{name} {other['accuracy']:.1%}" for name, other in group.items())
            clauses.append(f"{outcome} {amount} {nouns} ({numbers})")
        else:
            named = [f"{name} ({other['accuracy']:.1%})" for name, other in group.items()]
            clauses.append(f"{outcome} the {nouns} {_listed(named)}")
    return clauses


def _outcome(low: float, high: float) -> str:
    return _OUTCOMES[0 if low > 0 else 2 if high < 0 else 1]


def _listed(parts: list[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
