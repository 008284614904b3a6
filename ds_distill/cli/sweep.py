"""`ds-distill sweep`: one recipe under several settings and seeds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.shared import (
    SmallOption,
    print_reading,
    quiet_libraries,
)
from ds_distill.run.stopping import exit_on_signal, same_command


def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or a built-in name.")],
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=A,B,C...",
            help="Each combination of the values is a run; a key with one value is that of all.",
        ),
    ],
    small: SmallOption = False,
    folder: Annotated[
        Path | None, typer.Option(help="The sweep's folder.", show_default="runs/NAME-sweep")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the sweep in the folder.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Runs at once. They share the cores; each has a GPU where there are some."
        ),
    ] = 1,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep models and caches of all runs, not only their results."),
    ] = False,
) -> None:
    """Run a recipe under several settings and seeds, and compare the students.

    Every run is an ordinary one with a folder of its own, FOLDER/runs/NAME, and a report. Phases
    that runs have in common run once: fine-tuned teachers and caches, where the settings differ in
    a later phase alone. A setting is chosen on the examples that choose epochs, not on those that
    judge. With several seeds, scores have an interval.
    """
    quiet_libraries()
    from ds_distill.check.recipe import check_all
    from ds_distill.sweep.children import Pool, visible_gpus
    from ds_distill.sweep.sweep import Sweep
    from ds_distill.sweep.table import table

    path = folder or Path("runs") / f"{Path(recipe).stem}-sweep"
    asked = Sweep(recipe, settings, small, path, resume=resume)
    if not resume:  # data and models, once: what one run lacks all lack
        for note in check_all(asked.runs[0].recipe, print_reading):
            typer.echo(f"Note: {note}")
    asked.begin()
    for line in asked.what_it_does():
        typer.echo(line)
    pool = Pool(jobs, visible_gpus())
    message = f"{path} keeps what is done. Continue with: {same_command('--resume')}"
    with exit_on_signal(lambda: message, pool.end):
        failed = asked.run(pool, keep, lambda text: print(text, flush=True))
    found = asked.results()
    typer.echo(f"\n{table(found)}\n\nResults  {path / 'results.json'}")
    if failed:
        typer.echo(
            f"{len(failed)} of the runs failed: {', '.join(failed)}. --resume tries them again."
        )
        sys.exit(1)
