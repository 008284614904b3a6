"""report.html: one self-contained page that opens offline."""

from __future__ import annotations

import importlib.resources
from typing import Any

import jinja2

from ds_distill.parts.entry import Over
from ds_distill.parts.metrics import JUDGED, METRICS
from ds_distill.parts.phases import PHASES
from ds_distill.reporting.verdict import last_evaluation


def render_report(results: dict[str, Any]) -> str:
    """The HTML page of a run's results (the content of results.json)."""
    template = importlib.resources.files("ds_distill.reporting") / "report.html.jinja"
    evaluation = last_evaluation(results)
    over: Over = "masked tokens" if evaluation and "tokens" in evaluation["baseline"] else "classes"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        results=results,
        evaluation=evaluation,
        metrics=[e for e in METRICS[over].values() if e.name != JUDGED and e.shown is not None],
        pairs=_pairs(results),
        comparison=_last_comparison(results),
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
    return {**found[-1]["comparison"], "split": found[-1]["split"]} if found else None
