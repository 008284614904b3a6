"""`ds-distill`: one recipe under several settings and seeds, or a suite's tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_distill.cli.loading import go_offline, print_reading, quiet_libraries
from ds_distill.cli.options import Given, HowToRun, SmallOption, command
from ds_distill.errors import UserError, did_you_mean
from ds_distill.process.signals import exit_on_signal, same_command
from ds_distill.process.terminal import say

if TYPE_CHECKING:
    from ds_distill.sweep.runs import SweepRun
    from ds_distill.sweep.sweep import Sweep


@command("ds-distill sweep my.yaml seed=1,2,3 phases.distil.epochs=3,6")
def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or a built-in name.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=A,B,C...",
            help="Each combination of the values is a run; a key with one value is that of all.",
        ),
    ] = None,
    small: SmallOption = False,
    folder: Annotated[
        Path | None, typer.Option(help="The sweep's folder.", show_default="runs/NAME-sweep")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the sweep in the folder.")
    ] = False,
    *,
    how: HowToRun,
) -> None:
    """Run a recipe under several settings and seeds, and compare the students.

    Every run is an ordinary one with a folder of its own, FOLDER/runs/NAME, and a report. Phases
    that runs have in common run once: fine-tuned teachers and caches, where the settings differ in
    a later phase alone. A setting is chosen on the examples that choose epochs, not on those that
    judge. With several seeds, seed=1,2,3, scores have an interval.
    """
    from ds_distill.sweep.runs import variants

    fixed, found = variants(settings or [])
    given = Given(recipe, fixed, small)
    recipes = {variant: given.load(more=variant.overrides) for variant in found}
    path = folder or Path("runs") / f"{recipes[found[0]].name}-sweep"
    from ds_distill.sweep.runs import check_folder, runs_of

    runs = runs_of(recipes, path)
    check_folder(path, resume=resume)
    quiet_libraries()
    from ds_distill.sweep.tables import write_sweep

    run_sweep(path, runs, write_sweep, how, resume)


@command(
    "ds-distill suite compact-biomedical runs/mine runs/other data_folder=data --reference other "
    "--jobs 4"
)
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
    from ds_distill.sweep.suite import checkpoints_of, load_suite, suite_runs

    references, overrides = checkpoints_and_overrides(checkpoints)
    loaded = load_suite(suite, overrides)
    data = [task.data.path for task in loaded.tasks.values()]
    go_offline([*references, *data], loaded.models_folder)
    from ds_distill.sweep.runs import check_folder

    path = folder or Path("runs") / loaded.name
    check_folder(path, resume=resume)
    quiet_libraries()
    from ds_distill.sweep.tables import write_suite

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
    run_sweep(path, runs, report, how, resume, of_suite=True)


def checkpoints_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The two kinds of arguments. A folder that is there is a checkpoint: those of a sweep's runs
    have a `=` in their names."""
    overrides = [word for word in words if "=" in word and not Path(word).is_dir()]
    return [word for word in words if word not in overrides], overrides


def run_sweep(
    path: Path,
    runs: list[SweepRun],
    report: Callable[[Sweep], str],
    how: HowToRun,
    resume: bool,
    *,
    of_suite: bool = False,
) -> None:
    """Check the runs, run what is left, and report what was found. Exits with 1 where one failed.

    report: writes what the runs found, and returns it as text.
    of_suite: as of `check_runs`.
    """
    from ds_distill.process.machine import visible_gpus
    from ds_distill.sweep.sweep import Pool, Sweep, check_runs, launches_at_once

    asked = Sweep(path, runs)
    if how.num_gpus is not None:
        asked.check_ranks(how.num_gpus)
    if not resume:
        for note in check_runs(runs, print_reading, of_suite=of_suite):
            say(f"Note: {note}")
    gpus, jobs, ranks = visible_gpus(), how.jobs, how.num_gpus
    lines = asked.what_it_does()
    if ranks is not None:
        jobs = launches_at_once(jobs, ranks, gpus)
        lines.append(f"Each has {ranks} ranks; at once: {jobs}")
    asked.begin()
    for line in lines:
        say(line)
    pool = Pool(jobs, gpus, ranks)
    message = f"{asked.path} keeps what is done. Continue with: {same_command('--resume')}"
    with exit_on_signal(lambda: message, pool.end):
        failed = asked.run(pool, how.keep, say)
    say(f"\n{report(asked)}\n\nReport   {asked.path / 'report.html'}")
    say(f"Results  {asked.path / 'results.json'}")
    if failed:
        say(f"{len(failed)} of the runs failed: {', '.join(failed)}. --resume tries them again.")
        sys.exit(1)
