"""The verdict: a run's result in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.records import EvaluationRecord
from ds_distill.reporting.result_tables import outcome_of
from ds_distill.reporting.results import (
    answer_of,
    evaluations_of_student,
    last_evaluations,
    limits_of,
    task_metric_of,
)


def verdict(results: Mapping[str, Any]) -> str:
    """The shipped student's score in the task's metric, beside the baseline and the other models,
    in a sentence; one of each task where it was evaluated on others alone.

    Better and worse mean that the 95% interval of the difference excludes zero, which the table of
    the report has.
    """
    student = results["student"]
    if student is None:
        return "No student was trained."
    as_it_is = evaluations_of_student(results)
    of_student = [one for one in last_evaluations(results) if one in as_it_is]
    if not of_student:
        return (
            f"The student is `{student}`. No evaluate phase comes after it, so its quality was "
            "not measured."
        )
    several = len(of_student) > 1
    return " ".join(
        (f"On {one['task']}: " if several else "") + _sentence(one, student) for one in of_student
    )


def _sentence(evaluation: EvaluationRecord, student: str) -> str:
    metric, models = task_metric_of(evaluation), evaluation["models"]
    own, baseline = models[student], evaluation["baseline"]
    compared: dict[str, list[str]] = {
        outcome: []
        for outcome in ("better than", "worse than", "not told apart from", "not comparable with")
    }
    if baseline[metric.name] is not None:
        always = f"always predicting {answer_of(evaluation)} ({_score(metric, baseline)})"
        compared[_outcome(metric, own["to_baseline"]["interval"])].append(always)
    for row in evaluation["comparisons"]:
        if row["student"] == student:
            other = models[row["other"]]
            named = f"{other['role']} `{row['other']}` ({_score(metric, other)})"
            compared[_outcome(metric, row["interval"])].append(named)
    clauses = [f"{outcome} {_listed(named)}" for outcome, named in compared.items() if named]
    counted = f"{own['examples']:,} {'questions' if 'windows' in own else 'examples'}"
    if "tokens" in own:
        counted = f"{own['tokens']:,} masked tokens"
    if metric.name == "word_loss":
        counted = f"{own['hidden_words']:,} hidden words"
    score = f"{metric.title} {_score(metric, own)} on {counted} of {evaluation['split']}"
    return f"Student `{student}`: {score}{': ' if clauses else ''}{'; '.join(clauses)}."


def _score(metric: MetricClass, model: Mapping[str, Any]) -> str:
    """`70.0%`, or `70.0%; knows 4 of 7 labels`."""
    limits = limits_of(model).removeprefix(" (").removesuffix(")")
    return "; ".join(filter(None, [metric.shown_as(model[metric.name]), limits]))


def _outcome(metric: MetricClass, interval: list[float] | None) -> str:
    if interval is None:
        return "not comparable with"
    outcome = outcome_of(metric, interval)
    return f"{outcome} than" if outcome else "not told apart from"


def _listed(parts: list[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
