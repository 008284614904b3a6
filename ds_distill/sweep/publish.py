"""What a sweep or a suite found, written to its folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_distill.files import write_json, write_text
from ds_distill.reporting.figures import plot_settings
from ds_distill.reporting.page import page
from ds_distill.sweep.suite import Suite
from ds_distill.sweep.suite_table import suite_results, suite_tables
from ds_distill.sweep.sweep import Sweep
from ds_distill.sweep.table import metric_class, summary, sweep_table
from ds_distill.tables import Table


def write_sweep(sweep: Sweep) -> str:
    """Write results.json, report.html and figures/scores.svg of the runs that have ended. Returns
    the table as text."""
    found, figure = summary(sweep.ended(), sweep.draws()), ""
    if found["settings"]:
        file = sweep.path / "figures" / "scores.svg"
        plot_settings(found, metric_class(found), file)
        figure = file.read_text(encoding="utf-8")
    name = sweep.runs[0].recipe.name
    sentences = [f"{len(sweep.runs)} runs of {name}."]
    return _write(sweep, found, f"{name}: settings", sentences, [sweep_table(found)], figure)


def write_suite(suite: Suite, reference: str, sweep: Sweep) -> str:
    """Likewise of a suite, without a figure. reference: the checkpoint that others are compared
    with."""
    runs = [run.variant for run in sweep.runs]
    found = suite_results(runs, sweep.ended(), reference, suite.weights(), sweep.draws())
    found |= {"suite": suite.name, "lacks": suite.lacks}
    sentences = [suite.description, suite.lacks and f"It lacks: {suite.lacks}"]
    return _write(sweep, found, f"Suite {suite.name}", sentences, [*suite_tables(found)])


def _write(
    sweep: Sweep,
    found: dict[str, Any],
    title: str,
    sentences: Sequence[str],
    tables: Sequence[Table],
    figure: str = "",
) -> str:
    write_json(sweep.path / "results.json", {**found, "missing": sweep.missing})
    lines = [sentence for sentence in sentences if sentence]
    if sweep.missing:
        lines.append(f"Not finished, and not counted: {', '.join(sweep.missing)}.")
    write_text(sweep.path / "report.html", page(title, lines, tables, figure))
    return "\n\n".join(map(Table.text, tables))
