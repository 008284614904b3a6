"""`ds-distill evaluate`: any checkpoint on a recipe's task."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import quiet_libraries
from ds_distill.cli.options import Given, Overrides, SmallOption
from ds_distill.errors import UserError
from ds_distill.files import why_unwritable
from ds_distill.process.terminal import say


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A folder that transformers loads, a run's (its student), or a hub id."
        ),
    ],
    task: Annotated[
        str,
        typer.Argument(help="A recipe, whose task's data and metric are taken: a file or a name."),
    ],
    overrides: Overrides = None,
    small: SmallOption = False,
    name: Annotated[
        str | None,
        typer.Option("--task", metavar="NAME", help="Which task, where the recipe has several."),
    ] = None,
    split: Annotated[str, typer.Option(help="The split that judges.")] = "test",
    output: Annotated[
        Path | None,
        typer.Option(
            help="A new folder for results.json, report.html and what `report` compares.",
            show_default="nothing is kept",
        ),
    ] = None,
) -> None:
    """Evaluate any checkpoint on a recipe's task, as runs evaluate their models.

    The checkpoint needs a head of the task, trained on its labels. Nothing is trained.
    """
    if output is not None and output.exists():
        raise UserError(f"--output {output}: exists already. Name a new folder.")
    if output is not None and (why := why_unwritable(output)) is not None:
        raise UserError(f"--output {output}: {why}. Name another folder.")
    loaded = Given(task, overrides, small).load([checkpoint])
    quiet_libraries()
    from ds_distill.run.any_checkpoint import evaluation_recipe
    from ds_distill.run.folder import student_folder

    model = str(student_folder(checkpoint) or checkpoint)
    recipe = evaluation_recipe(loaded, name, model, split)
    with tempfile.TemporaryDirectory(prefix="ds-distill-") as temporary:
        from ds_distill.files import read_json
        from ds_distill.reporting.result_tables import evaluation_tables
        from ds_distill.run.execute import execute  # imports deepspeed: seconds

        folder = output or Path(temporary) / "run"
        execute(recipe, folder)
        [record] = read_json(folder / "results.json")["phases"]
    for table in evaluation_tables(record):
        say(f"\n{table.text()}")
    if output is not None:
        say(f"\nReport   {output / 'report.html'}\nResults  {output / 'results.json'}")
