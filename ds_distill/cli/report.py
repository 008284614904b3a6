"""`ds-distill report`: a run's report anew, or finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_distill.errors import UserError
from ds_distill.process.terminal import say


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs, or of `evaluate`."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The page to write; the numbers go to a .json beside it.",
            show_default="comparison.html; of one run its report.html",
        ),
    ] = None,
) -> None:
    """Set finished runs side by side, on the terminal and on a page.

    Models that judged the same examples stand in one table, with the paired interval of their
    difference to the first run's student; other tasks and splits in tables of their own. Of one
    run it writes report.html anew; of one that has not finished it says where the run stopped.
    """
    from ds_distill.files import write_json, write_text
    from ds_distill.recipe import load_recipe
    from ds_distill.records import read_results
    from ds_distill.reporting.page import page
    from ds_distill.run.folder import SWEEP, RunFolder
    from ds_distill.run.publish import report_stopped, write_report
    from ds_distill.sweep.side_by_side import side_by_side, side_tables
    from ds_distill.tables import Table

    for run in runs:
        if (run / SWEEP).is_file():
            _say_sweep(run, alone=len(runs) == 1)
            return
    first = RunFolder(runs[0])
    if len(runs) == 1 and first.holds_run() and (output is None or not first.results.is_file()):
        recipe = load_recipe(runs[0] / "recipe.yaml")
        if first.results.is_file():
            write_report(recipe, first, read_results(first.results))
        else:
            report_stopped(recipe, first, "It has not finished.")
            say(first.how_to_finish())
        say(f"Report   {first.report}")
        return
    output = output or Path("comparison.html")
    if output.suffix != ".html":
        raise UserError(f"--output {output}: name a file that ends in .html.")
    groups = side_by_side(runs)
    tables = list(side_tables(groups))
    say("\n\n".join(map(Table.text, tables)))
    write_json(output.with_suffix(".json"), groups)
    sentences = (
        []
        if len(tables) == 1
        else ["The runs were judged on different examples, tasks or metrics: a table for each."]
    )
    write_text(output, page("Runs side by side", sentences, tables))
    say(f"\nReport   {output}\nResults  {output.with_suffix('.json')}")


def _say_sweep(folder: Path, *, alone: bool) -> None:
    """Where a sweep's own page is. Raises UserError where there is none, or other runs are asked
    for."""
    page = folder / "report.html"
    if not alone:
        raise UserError(f"{folder}: holds a sweep. Name its runs: {folder / 'runs'}/...")
    if not page.is_file():
        raise UserError(
            f"{folder}: holds a sweep that has no report yet. Finish it with the sweep's command "
            f"and --resume, or name runs that have ended: {folder / 'runs'}/..."
        )
    say(f"{folder} holds a sweep, which has a page of its own.")
    say(f"\nReport   {page}\nResults  {folder / 'results.json'}")
