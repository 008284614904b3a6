"""`ds-distill`: recipes under several settings and seeds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_distill.cli.loading import print_reading, quiet_libraries
from ds_distill.cli.options import Given, SmallOption, command
from ds_distill.process.signals import exit_on_signal, same_command
from ds_distill.process.terminal import say

if TYPE_CHECKING:
    from ds_distill.sweep.sweep import Sweep


JobsOption = Annotated[
    int,
    typer.Option(
        min=1, help="Runs at once. They share the cores; each has a GPU where there are some."
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Ranks of each run, on this machine; without GPUs, CPU processes. Runs at once are "
        "then no more than have a GPU, or a core, for each rank.",
        show_default="runs are not launched",
    ),
]
KeepOption = Annotated[
    bool,
    typer.Option("--keep", help="Keep models and caches of all runs, not only their results."),
]


@command("ds-distill sweep my.yaml seed=1,2,3 phases.distil.epochs=3,6")
def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=A,B,C...]",
            help="Recipes: files, built-in names, or folders of recipes. Each combination of the "
            "values is a run of each; a key with one value is that of all.",
        ),
    ],
    small: SmallOption = False,
    folder: Annotated[
        Path | None, typer.Option(help="The sweep's folder.", show_default="runs/NAME-sweep")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the sweep in the folder.")
    ] = False,
    jobs: JobsOption = 1,
    num_gpus: RanksOption = None,
    keep: KeepOption = False,
) -> None:
    """Run recipes under several settings and seeds, and compare the students.

    Every run is an ordinary one with a folder of its own, FOLDER/runs/NAME, and a report. Phases
    that runs have in common run once: fine-tuned teachers and caches, where the settings differ in
    a later phase alone. A setting is chosen on the examples that choose epochs, not on those that
    judge. With several seeds, seed=1,2,3, scores have an interval. Of several recipes a setting is
    chosen for each, and for each value of student.model; these have means over the recipes.
    """
    from ds_distill.recipe.load import name_of
    from ds_distill.sweep.runs import check_folder, recipes_of, runs_of, variants

    named = [word for word in words if "=" not in word or Path(word).exists()]
    files = recipes_of(named)
    fixed, settings = variants([word for word in words if word not in named])
    recipes = {
        replace(variant, recipe=name if len(files) > 1 else ""): given.load(more=variant.overrides)
        for name, given in ((name, Given(file, fixed, small)) for name, (file, _) in files.items())
        for variant in settings
    }
    first = next(iter(recipes.values())).name if len(files) == 1 else name_of(Path(named[0]))
    path = folder or Path("runs") / f"{first}-sweep"
    runs = runs_of(recipes, path, {name: group for name, (_, group) in files.items()})
    check_folder(path, resume=resume)
    quiet_libraries()
    from ds_distill.sweep.sweep import Sweep, check_runs

    asked = Sweep(path, runs)
    if num_gpus is not None:
        asked.check_ranks(num_gpus)
    if not resume:
        for note in check_runs(runs, print_reading):
            say(f"Note: {note}")
    run_sweep(asked, jobs, num_gpus, keep)


def run_sweep(asked: Sweep, jobs: int, ranks: int | None, keep: bool) -> None:
    """Run what is left, and report what was found. Exits with 1 where a run failed."""
    from ds_distill.process.machine import visible_gpus
    from ds_distill.sweep.sweep import Pool, launches_at_once
    from ds_distill.sweep.tables import write_report

    gpus, lines = visible_gpus(), asked.what_it_does()
    if ranks is not None:
        jobs = launches_at_once(jobs, ranks, gpus)
        lines.append(f"Each has {ranks} ranks; at once: {jobs}")
    asked.begin()
    for line in lines:
        say(line)
    pool = Pool(jobs, gpus, ranks)
    message = f"{asked.path} keeps what is done. Continue with: {same_command('--resume')}"
    with exit_on_signal(lambda: message, pool.end):
        failed = asked.run(pool, keep, say)
    say(f"\n{write_report(asked)}\n\nReport   {asked.path / 'report.html'}")
    say(f"Results  {asked.path / 'results.json'}")
    if failed:
        say(f"{len(failed)} of the runs failed: {', '.join(failed)}. --resume tries them again.")
        sys.exit(1)
