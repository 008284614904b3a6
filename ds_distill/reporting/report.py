"""report.html: one self-contained page that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from ds_distill.evaluation.scores import RELIABILITY_BINS
from ds_distill.recipe.metrics import METRICS
from ds_distill.reporting.by_class import by_class
from ds_distill.reporting.confusions import commonest_confusions
from ds_distill.reporting.curves import HEIGHT, WIDTH, Training
from ds_distill.reporting.export_table import export_table
from ds_distill.reporting.page import environment
from ds_distill.reporting.result_tables import class_table, evaluation_tables
from ds_distill.reporting.results import (
    NOUNS,
    PER_CLASS,
    last_evaluations,
    limits_of,
    metrics_of,
    records_of,
    task_metric_of,
)
from ds_distill.reporting.routing_shares import heat_maps
from ds_distill.tables import Table


def render_report(
    results: dict[str, Any],
    trainings: Sequence[Training] = (),
    *,
    loading: Sequence[str] = (),
    recipe: str = "",
) -> str:
    """The HTML page of a run's results (the content of results.json).

    trainings: how they went, see `trainings_of`. loading: see `how_to_load`. recipe: its YAML.
    """
    comparison, evaluations = _last_comparison(results), last_evaluations(results)
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            results=results,
            evaluations=[_evaluation(one, results, len(evaluations) > 1) for one in evaluations],
            comparison=comparison,
            chooses=task_metric_of(comparison) if comparison else None,
            maps=heat_maps(comparison, PER_CLASS.get(comparison["over"], "F1"))
            if comparison
            else [],
            disagreements=comparison["disagreements"] if comparison else [],
            nouns=NOUNS,
            classes=_classes_of(comparison) if comparison and comparison["over"] in NOUNS else None,
            expansions=records_of(results, "start"),
            trainings=trainings,
            exported=export_table(results["exported"]) if "exported" in results else None,
            loading=loading,
            recipe=recipe,
            width=WIDTH,
            height=HEIGHT,
            teachers=[_teacher_score(one) for one in results.get("teacher_scores", [])],
        )
    )


def _classes_of(comparison: dict[str, Any]) -> Table:
    """Targets and teachers by class."""
    columns = {name: score["per_class"] for name, score in comparison["policies"].items()}
    teachers = comparison["teachers"].items()
    columns |= {f"teacher {name}": score["per_class"] for name, score in teachers}
    columns["any teacher"] = comparison["any_teacher"]["per_class"]
    return class_table("", columns, comparison["choice"])


def _teacher_score(entry: dict[str, Any]) -> dict[str, Any]:
    """With the name and the score as they are shown."""
    metric = task_metric_of(entry)
    name = entry["teacher"] + limits_of(entry)
    shown = f"{metric.title} {metric.shown_as(entry['score'])}"
    return {"doubt": None, **entry, "teacher": name, "shown": shown}


def _evaluation(evaluation: dict[str, Any], results: dict[str, Any], several: bool) -> Markup:
    """A part of the page.

    several: whether it is one of several, so that its task is to be named.
    """
    task_metric, *_ = metrics_of(evaluation).values()
    student = results["student"]
    first, *rest = evaluation_tables(evaluation, student, results.get("speed"))
    named = f"{evaluation['task']}, " if several else ""
    pairs = _pairs(evaluation, results["student"])
    judged = _judged(evaluation, results["student"])
    confused = "confusion" in evaluation["models"][judged]
    of_classes = evaluation["over"] in NOUNS
    return Markup(  # the template has escaped what it shows
        environment()
        .get_template("evaluation.html.jinja")
        .render(
            results=results,
            evaluation=evaluation,
            first=replace(first, title=f"{task_metric.heading()} on {named}{evaluation['split']}"),
            rest=rest,
            task_metric=task_metric,
            pairs=pairs,
            judged=judged,
            confusions=commonest_confusions(evaluation["models"], judged) if confused else [],
            by_class=by_class(evaluation["models"], judged) if of_classes else None,
            gaps=any("gap_closed" in row for row in pairs),
            measures=PER_CLASS,
            nouns=NOUNS,
            points=METRICS["classes"]["accuracy"],
            reliability_bins=RELIABILITY_BINS,
        )
    )


def _judged(evaluation: dict[str, Any], student: str | None) -> str:
    """The shipped student where it is evaluated here, else the last model that was judged on all
    examples; where none was, the last."""
    models = evaluation["models"]
    if student is not None and student in models:
        return student
    return sorted(models, key=lambda name: "not_given" not in models[name])[-1]


def _pairs(evaluation: dict[str, Any], student: str) -> list[dict[str, Any]]:
    """Comparisons of each student with each other model, the shipped student first; a pair of
    students appears once."""
    shown: list[dict[str, Any]] = []
    for row in sorted(evaluation["comparisons"], key=lambda row: row["student"] != student):
        if not any((row["other"], row["student"]) == (r["student"], r["other"]) for r in shown):
            shown.append(row)
    return shown


def _last_comparison(results: dict[str, Any]) -> dict[str, Any] | None:
    """The policy comparison of the last expertise phase, with its split, if there is one."""
    found = records_of(results, "expertise")
    if not found:
        return None
    record = found[-1]
    comparison, about = record["comparison"], {k: record[k] for k in ("split", "left_out")}
    pairs = zip(comparison.get("disagreements", []), record.get("texts", []), strict=False)
    about["disagreements"] = [{**one, "text": text} for one, text in pairs]
    about["disagreements_of"] = comparison.get("disagreements_of") or comparison["choice"]
    return {**comparison, **about}
