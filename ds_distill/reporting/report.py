"""report.html: one self-contained page that opens offline."""

from __future__ import annotations

from typing import Any

from ds_distill.evaluation.report import RELIABILITY_BINS
from ds_distill.parts.metrics import METRICS
from ds_distill.parts.phases import PHASES
from ds_distill.reporting.tables import environment
from ds_distill.reporting.verdict import (
    NOUNS,
    PER_CLASS,
    last_evaluation,
    metrics_of,
    settings_note,
)


def render_report(results: dict[str, Any]) -> str:
    """The HTML page of a run's results (the content of results.json)."""
    evaluation = last_evaluation(results)
    judge, *others = metrics_of(evaluation).values() if evaluation else [None]
    comparison = _last_comparison(results)
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            results=results,
            evaluation=evaluation,
            judge=judge,
            note=settings_note(evaluation) if evaluation else "",
            metrics=others,
            pairs=_pairs(results),
            gaps=any("gap_closed" in row for row in _pairs(results)),
            comparison=comparison,
            chooses=METRICS[comparison["over"]][comparison["metric"]] if comparison else None,
            measures=PER_CLASS,
            nouns=NOUNS,
            points=METRICS["classes"]["accuracy"],
            reliability_bins=RELIABILITY_BINS,
        )
    )


def _pairs(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Comparisons of each student with each other model, the shipped student first; a pair of
    students appears once."""
    evaluation = last_evaluation(results)
    rows = evaluation["comparisons"] if evaluation else []
    shown: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: row["student"] != results["student"]):
        if not any((row["other"], row["student"]) == (r["student"], r["other"]) for r in shown):
            shown.append(row)
    return shown


def _last_comparison(results: dict[str, Any]) -> dict[str, Any] | None:
    """The policy comparison of the last expertise phase, with its split, if there is one."""
    found = [r for r in results["phases"] if PHASES[r["kind"]].makes == "expertise"]
    if not found:
        return None
    record = found[-1]
    return {**record["comparison"], "split": record["split"], "left_out": record["left_out"]}
