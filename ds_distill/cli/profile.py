"""`ds-distill profile`: where time and memory go."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import quiet_libraries, write_json_output
from ds_distill.cli.options import Given, Overrides, SmallOption
from ds_distill.errors import UserError
from ds_distill.process.identity import get_world_size
from ds_distill.process.signals import Stopped
from ds_distill.process.terminal import say


def profile(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A recipe, whose trainings are measured; or a finished run's folder, whose models "
            "are.",
        ),
    ],
    overrides: Overrides = None,
    small: SmallOption = False,
    steps: Annotated[
        int, typer.Option(min=5, help="Optimizer steps of each training to measure.")
    ] = 25,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder to work in, new; removed again.", show_default="runs/NAME-profile"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the profile to this file, too.")] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="Of a run: draw its models' quality against latency (.svg)."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome trace (.json) of some steps, with memory; they are slower then. "
            "Open it in ui.perfetto.dev."
        ),
    ] = None,
) -> None:
    """Where time and memory go: of each training, or of finished models.

    Of a recipe each training runs for some steps, on few examples, as it would: the time of data,
    each live teacher, routing, student, backward pass, communication and optimizer; tokens a
    second, operations, memory. A launcher may start it on several ranks:
    deepspeed --num_gpus 8 --module ds_distill profile RECIPE --folder FOLDER.

    Of a run: size, latency, throughput and score of teachers and students.
    """
    from ds_distill.reporting.figure_files import check_figure

    if figure is not None:
        check_figure(figure)
    if (Path(recipe) / "recipe.yaml").is_file():
        _models(Path(recipe), json, figure)
    else:
        if figure is not None:
            raise UserError(f"--figure {figure}: is of a finished run's models. Leave it out.")
        _trainings(Given(recipe, overrides, small), steps, folder, json, trace)


def _trainings(
    given: Given,
    steps: int,
    folder: Path | None,
    json: Path | None,
    trace: Path | None,
) -> None:
    whole = given.load()
    quiet_libraries()
    import torch

    from ds_distill.check.check import open_sources
    from ds_distill.profiling.shorten import shortening, total_steps
    from ds_distill.profiling.table import trainings_text
    from ds_distill.profiling.trainings import profile_trainings
    from ds_distill.run.environment import describe_environment

    splits = {task: source.splits for task, source in open_sources(whole).items()}
    short = given.load(more=shortening(whole, steps, splits))
    ranks = get_world_size()
    sentence = (
        f"A short run: {total_steps(steps)} steps of each training, the first of which warm "
        "up, on few examples. What it says of their quality means nothing."
    )
    work = folder or Path("runs") / f"{short.name}-profile"
    try:
        found = profile_trainings(short, work, trace, partial(say, sentence, error=True))
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    if not found:  # another rank than the first
        return
    say("\n" + trainings_text(found, ranks), end="")
    if json is not None:
        environment = describe_environment(ranks, "cuda" if torch.cuda.is_available() else "cpu")
        trainings = [one.to_json() for one in found]
        content = {"recipe": short.name, "environment": environment, "trainings": trainings}
        write_json_output(json, content)


def _models(run: Path, json: Path | None, figure: Path | None) -> None:
    import torch

    quiet_libraries()
    from ds_distill.profiling.charts import plot_models
    from ds_distill.profiling.models import profile_models
    from ds_distill.profiling.table import models_text
    from ds_distill.run.environment import describe_environment

    found = profile_models(run, partial(say, error=True))
    say("\n" + models_text(found), end="")
    if json is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        models = [one.to_json() for one in found]
        write_json_output(json, {"environment": describe_environment(1, device), "models": models})
    if figure is not None:
        plot_models(found, figure)
