"""The verdict: a run's result in a few sentences."""

from __future__ import annotations

from typing import Any

from ds_distill.parts.phases import PHASES

_OUTCOMES = ("better than", "level with", "worse than")


def verdict(results: dict[str, Any]) -> str:
    """The shipped student's accuracy beside the baseline, teachers, controls and other students.

    Better and worse mean that the 95% interval of the difference excludes zero.
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
    counted = (
        f"{own['tokens']:,} masked tokens" if "tokens" in own else f"{own['examples']:,} examples"
    )
    rows = {row["other"]: row for row in evaluation["comparisons"] if row["student"] == student}
    clauses = [] if _above_baseline(own) else [_to_baseline(own, evaluation["baseline"])]
    for role, noun, addition in (
        ("teacher", "teacher", ""),
        ("control", "student", " without teachers"),
    ):
        # Two models at the baseline are not compared.
        others = {
            name: models[name]
            for name in rows
            if models[name]["role"] == role
            and (_above_baseline(own) or _above_baseline(models[name]))
        }
        clauses += _clauses(others, rows, noun, addition)
    accuracy = f"accuracy {own['accuracy']:.1%} on {counted} of {evaluation['split']}"
    outcome = f", {_listed(clauses)}" if clauses else ""
    sentences = [f"Student `{student}`: {accuracy}{outcome}."]
    sentences += _of_other_students(rows, models)
    sentences += _of_models_at_baseline(evaluation, student, _above_baseline(own))
    return " ".join(sentences)


def last_evaluation(results: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the last evaluate phase of the shipped student's task, if there is one."""
    records = [r for r in results["phases"] if PHASES[r["kind"]].makes == "evaluation"]
    of_task = [record for record in records if record["task"] == results["task"]]
    return (of_task or [None])[-1]


def _above_baseline(model: dict[str, Any]) -> bool:
    return bool(model["to_baseline"]["interval"][0] > 0)


def _to_baseline(model: dict[str, Any], baseline: dict[str, Any]) -> str:
    worse = model["to_baseline"]["interval"][1] < 0
    constant = f"always predicting {baseline['answer']!r} ({baseline['accuracy']:.1%})"
    return f"worse than {constant}" if worse else f"no better than {constant}"


def _of_other_students(rows: dict[str, Any], models: dict[str, Any]) -> list[str]:
    """One sentence that compares the shipped student with the others."""
    others = {name: row for name, row in rows.items() if models[name]["role"] == "student"}
    clauses = []
    for outcome in _OUTCOMES:
        group = [name for name, row in others.items() if _outcome(row) == outcome]
        if not group:
            continue
        named = _listed([f"`{name}` ({models[name]['accuracy']:.1%})" for name in group])
        if outcome == "level with":
            differences = _listed([_points(others[name]) for name in group])
            clauses.append(f"its difference to {named} is within chance: {differences}")
        else:
            clauses.append(f"it is {outcome} {named}")
    return [f"Among the students, {'; '.join(clauses)}."] if clauses else []


def _of_models_at_baseline(evaluation: dict[str, Any], student: str, above: bool) -> list[str]:
    """One sentence on the other models that are no better than the baseline."""
    names = [
        f"`{name}` ({model['accuracy']:.1%})"
        for name, model in evaluation["models"].items()
        if name != student and not _above_baseline(model)
    ]
    if not names:
        return []
    if not above:
        return [f"Nor {'is' if len(names) == 1 else 'are'} {_listed(names)} better than that."]
    baseline = evaluation["baseline"]
    verb = "is" if len(names) == 1 else "are"
    return [
        f"{_listed(names)} {verb} no better than always predicting {baseline['answer']!r} "
        f"({baseline['accuracy']:.1%})."
    ]


def _clauses(
    others: dict[str, dict[str, Any]], rows: dict[str, Any], noun: str, addition: str
) -> list[str]:
    """One clause per outcome: `both` or `all` where all others share it, else their names."""
    clauses = []
    for outcome in _OUTCOMES:
        group = {name: other for name, other in others.items() if _outcome(rows[name]) == outcome}
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


def _outcome(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return _OUTCOMES[0 if low > 0 else 2 if high < 0 else 1]


def _points(row: dict[str, Any]) -> str:
    # + 0.0 turns -0.0 into 0.0.
    numbers = (round(100 * value, 1) + 0.0 for value in (row["difference"], *row["interval"]))
    return "{:+.1f} points (95% interval {:+.1f} to {:+.1f})".format(*numbers)


def _listed(parts: list[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
