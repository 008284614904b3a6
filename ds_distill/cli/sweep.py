"""`ds-distill sweep`: one recipe under several settings and seeds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_distill.cli.loading import print_reading, quiet_libraries
from ds_distill.cli.options import Given, HowToRun, SmallOption
from ds_distill.process.signals import exit_on_signal, same_command
from ds_distill.process.terminal import say

if TYPE_CHECKING:
    from ds_distill.recipe import Recipe
    from ds_distill.sweep.runs import SweepRun
    from ds_distill.sweep.sweep import Sweep


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
    from ds_distill.sweep.grid import variants

    fixed, found = variants(settings or [])
    given = Given(recipe, fixed, small)
    loaded = [given.load(more=variant.overrides) for variant in found]
    path = folder or Path("runs") / f"{loaded[0].name}-sweep"
    from ds_distill.sweep.runs import check_folder, runs_of

    runs = runs_of(recipe, fixed, found, small, path)
    check_folder(path, resume=resume)
    quiet_libraries()
    from ds_distill.sweep.publish import write_sweep

    first, *others = runs
    recipes = {" ".join(run.variant.overrides): run.recipe for run in others}
    run_sweep(path, runs, write_sweep, how, resume, {"": first.recipe, **recipes})


def run_sweep(
    path: Path,
    runs: list[SweepRun],
    report: Callable[[Sweep], str],
    how: HowToRun,
    resume: bool,
    recipes: Mapping[str, Recipe],
    *,
    chooses: bool = False,
) -> None:
    """Check the runs, run what is left, and report what was found. Exits with 1 where one failed.

    report: writes what the runs found, and returns it as text.
    recipes, chooses: as of `check_runs`.
    """
    from ds_distill.process.machine import visible_gpus
    from ds_distill.sweep.check import check_runs
    from ds_distill.sweep.run_processes import Pool, launches_at_once
    from ds_distill.sweep.sweep import Sweep

    asked = Sweep(path, runs)
    if how.num_gpus is not None:
        asked.check_ranks(how.num_gpus)
    if not resume:
        for note in check_runs(recipes, print_reading, chooses=chooses):
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
