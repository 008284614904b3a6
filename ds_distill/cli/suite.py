"""`ds-distill suite`: checkpoints fine-tuned and judged on many tasks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import go_offline, quiet_libraries
from ds_distill.cli.options import HowToRun
from ds_distill.cli.sweep import run_sweep
from ds_distill.errors import UserError, did_you_mean
from ds_distill.process.terminal import say


def suite(
    suite: Annotated[str, typer.Argument(help="A suite's file, or a built-in name.")],
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT... [KEY=VALUE...]",
            help="Folders that transformers loads, runs' folders (their students), or hub ids; and "
            "changes to the suite, e.g. data_folder=DIR seeds=[1]",
        ),
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The checkpoint that others are compared with, by its folder's name.",
            show_default="the first",
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="The suite's folder.", show_default="runs/NAME")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the suite in the folder.")
    ] = False,
    *,
    how: HowToRun,
) -> None:
    """Fine-tune checkpoints on the tasks of a suite, and compare them.

    Each task, checkpoint, setting of the grid and seed is an ordinary run, FOLDER/runs/NAME. The
    setting is chosen for each task and checkpoint on the validation split; the test split judges.
    """
    from ds_distill.sweep.suite import checkpoints_of, first_recipes, load_suite, suite_runs

    references, overrides = checkpoints_and_overrides(checkpoints)
    loaded = load_suite(suite, overrides)
    data = [task.data.path for task in loaded.tasks.values()]
    go_offline([*references, *data], loaded.models_folder)
    from ds_distill.sweep.runs import check_folder

    path = folder or Path("runs") / loaded.name
    check_folder(path, resume=resume)
    quiet_libraries()
    from ds_distill.sweep.publish import write_suite

    given = checkpoints_of(references)
    if reference is not None and reference not in given:
        raise UserError(
            f"--reference {reference}: no checkpoint is called so."
            f"{did_you_mean(reference, given)} They are {', '.join(given)}."
        )
    runs = suite_runs(loaded, given, path.absolute())
    if loaded.lacks:
        say(f"The suite lacks: {' '.join(loaded.lacks.split())}")
    report = partial(write_suite, loaded, reference or next(iter(given)))
    run_sweep(path, runs, report, how, resume, first_recipes(runs), chooses=True)


def checkpoints_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The two kinds of arguments. A folder that is there is a checkpoint: those of a sweep's runs
    have a `=` in their names."""
    overrides = [word for word in words if "=" in word and not Path(word).is_dir()]
    return [word for word in words if word not in overrides], overrides
