"""What a sweep found, written to its folder."""

from __future__ import annotations

from ds_distill.files import write_json, write_text
from ds_distill.reporting.figures import plot_settings
from ds_distill.reporting.page import page
from ds_distill.sweep.sweep import Sweep
from ds_distill.sweep.table import metric_class, summary, sweep_table


def write_report(sweep: Sweep) -> str:
    """Write results.json, report.html and figures/scores.svg of the runs that have ended. Returns
    the table as text."""
    found = {**summary(sweep.ended(), sweep.draws()), "missing": sweep.missing}
    write_json(sweep.path / "results.json", found)
    figure, table = "", sweep_table(found)
    if found["settings"]:
        file = sweep.path / "figures" / "scores.svg"
        plot_settings(found, metric_class(found), file)
        figure = file.read_text(encoding="utf-8")
    name = sweep.runs[0].recipe.name
    sentences = [f"{len(sweep.runs)} runs of {name}."]
    if sweep.missing:
        sentences.append(f"Not finished, and not counted: {', '.join(sweep.missing)}.")
    write_text(sweep.path / "report.html", page(f"{name}: settings", sentences, [table], figure))
    return table.text()
