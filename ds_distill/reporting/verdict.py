"""A run's outcome in one sentence."""

from __future__ import annotations

from typing import Any


def verdict(results: dict[str, Any]) -> str:
    """What the shipped student is worth beside teachers and controls, with the numbers."""
    evaluation = last_evaluation(results)
    student = results["student"]
    if student is None:
        return "No student was trained."
    if evaluation is None or student not in evaluation["models"]:
        return f"The student is `{student}`; the recipe has no evaluate phase, so no accuracy."
    models = evaluation["models"]
    own = models[student]
    examples = f"on {own['examples']:,} examples of {evaluation['split']}"
    opening = f"The student `{student}` is right on {own['accuracy']:.1%} {examples}"
    clauses = []
    for role, plural in (("teacher", "teachers"), ("control", "students without teachers")):
        others = {name: model for name, model in models.items() if model["role"] == role}
        if not others:
            continue
        beaten = [name for name in others if _interval(evaluation, student, name)[0] > 0]
        lost = [name for name in others if _interval(evaluation, student, name)[1] < 0]
        numbers = ", ".join(f"{name} {model['accuracy']:.1%}" for name, model in others.items())
        if len(beaten) == len(others):
            amount = {1: "the", 2: "both"}.get(len(others), f"all {len(others)}")
            noun = plural if len(others) > 1 else plural.replace("teachers", "teacher")
            if role == "control" and len(others) == 1:
                noun = "student without teachers"
            clauses.append(f"better than {amount} {noun} ({numbers})")
        elif len(lost) == len(others):
            clauses.append(f"worse than the {plural} ({numbers})")
        else:
            close = [name for name in others if name not in beaten and name not in lost]
            parts = []
            if beaten:
                parts.append(f"better than {', '.join(beaten)}")
            if close:
                parts.append(f"level with {', '.join(close)}")
            if lost:
                parts.append(f"worse than {', '.join(lost)}")
            clauses.append(f"{'; '.join(parts)} ({numbers})")
    return f"{opening}, {' and '.join(clauses)}." if clauses else f"{opening}."


def last_evaluation(results: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the last evaluate phase, if there is one."""
    records = [record for record in results["phases"] if record["kind"] == "evaluate"]
    return records[-1] if records else None


def _interval(evaluation: dict[str, Any], student: str, other: str) -> tuple[float, float]:
    for comparison in evaluation["comparisons"]:
        if (comparison["student"], comparison["other"]) == (student, other):
            low, high = comparison["interval"]
            return low, high
    return (float("-inf"), float("inf"))
