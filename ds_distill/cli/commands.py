"""`ds-distill`: a recipe's commands, one thin function each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_distill import __version__
from ds_distill.cli.loading import (
    execute_recipe,
    go_offline,
    import_without_torch,
    phases_until,
    print_reading,
    quiet_libraries,
    write_json_output,
)
from ds_distill.cli.options import (
    FolderOption,
    Given,
    Resumable,
    ResumeOption,
    app,
    command,
)
from ds_distill.errors import UserError
from ds_distill.init import DEFAULT_TEACHER
from ds_distill.launch import LaunchOptions, Work
from ds_distill.launch import launch as launch_ranks
from ds_distill.process.activity import announced
from ds_distill.process.identity import get_rank, get_world_size
from ds_distill.process.signals import Stopped
from ds_distill.process.terminal import say

if TYPE_CHECKING:
    from ds_distill.tables import Table

UntilOption = Annotated[
    str | None,
    typer.Option(metavar="PHASE", help="End after this phase; --resume does the others."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"ds-distill {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@command("ds-distill run tweeteval-emotion task.data.path=my/tweets seed=1", cls=Resumable)
def run(
    given: Given,
    folder: FolderOption = None,
    resume: ResumeOption = False,
    until: UntilOption = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Push the finished run there, as `push` does."),
    ] = None,
) -> None:
    """Run a recipe: all its phases, in this process (or as one rank of a launched run)."""
    loaded = given.load()
    path = folder or Path("runs") / loaded.name
    if push_to_hub is not None:
        from ds_distill.export.hub import check_access

        if until is not None:
            raise UserError("--push-to-hub: with --until the run ends unfinished. Leave one out.")
        check_access(push_to_hub)
    first = None if until is None else phases_until(loaded, until)
    execute_recipe(loaded, path, resume=resume, first=first)
    if push_to_hub is not None and get_rank() == 0:
        from ds_distill.cli.results import push

        try:
            push(path, push_to_hub)
        except UserError as error:
            again = f"push it with: ds-distill push {path} {push_to_hub}"
            raise UserError(f"{error} The run is finished; {again}") from error


TypeOption = Annotated[
    str | None, typer.Option(help="task.type.", show_default="guessed from the columns")
]
TextOption = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN", help="The text's column; twice for pairs.")
]


@command("ds-distill init tickets --teacher models/bert --teacher models/roberta")
def init(
    data: Annotated[
        Path,
        typer.Argument(help="A folder with a file per split, or one file: as task.data.path."),
    ],
    teacher: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="A teacher's folder or hub id; may be given again."),
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            help="The student's folder or hub id.",
            show_default="some of the first teacher's layers",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The recipe to write.", show_default="DATA's name.yaml")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    task: TypeOption = None,
    text: TextOption = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The labels' column.")] = None,
) -> None:
    """Write a first recipe for your data and teachers, with a comment on each guess.

    The columns are guessed from their names and labels, the labels come from teachers and data, the
    length from the texts. Where it cannot be told, a message says which option decides.
    """
    target = output or Path(f"{data.resolve().name.split('.')[0]}.yaml")
    if target.exists() and not force:
        raise UserError(f"{target}: is there already. Name another file with --output, or --force.")
    teachers = teacher or [DEFAULT_TEACHER]
    go_offline([*teachers, *([student] if student else [])])
    import_without_torch()
    quiet_libraries()
    from ds_distill.files import write_text
    from ds_distill.init.recipe import DataOptions, guess, recipe_text
    from ds_distill.recipe.tasks import TASKS

    if task is not None and task not in TASKS:
        raise UserError(f"--task {task}: choose one of {', '.join(TASKS)}.")
    found = guess(data, DataOptions(task, text or (), label))
    for sentence in found.notes:
        say(sentence)
    made = recipe_text(found, str(data), teacher or [], student)
    write_text(target, made)
    say(f"\n{made}\nWritten to {target}.")
    if not teacher:
        say(
            f"No --teacher was named: {DEFAULT_TEACHER} is fine-tuned first, 355 million "
            "parameters. Without a GPU that takes days: name a small one there, such as "
            "--teacher google/bert_uncased_L-4_H-256_A-4."
        )
    say("Next:")
    for then in ("check", "plan", "run"):
        say(f"  ds-distill {then} {target}")


@command(
    "ds-distill quickstart --folder runs/first-try",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def quickstart(context: typer.Context) -> None:
    """Two teachers, a small student of each routing, and a control; real text, no GPU needed.

    Minutes on two cores. The same as `run quickstart`, with its options and changes of keys.
    """
    app(["run", "quickstart", *context.args], prog_name="ds-distill", standalone_mode=False)


@command("ds-distill launch my.yaml --num-gpus 8 deepspeed=zero3_bf16", cls=Resumable)
def launch(
    given: Given,
    folder: FolderOption = None,
    resume: ResumeOption = False,
    until: UntilOption = None,
    *,
    options: LaunchOptions,
) -> None:
    """Run a recipe on many ranks, of this machine or of several: by torchrun, or by DeepSpeed's
    runner with --hostfile.

    On several machines the folder must be on a file system that all of them see.
    """
    options.check()
    loaded = given.load()
    path = folder or Path("runs") / loaded.name
    if until is not None:
        phases_until(loaded, until)
    from ds_distill.run.folder import RunFolder

    run_folder = RunFolder(path.absolute())
    command, result = ["run"], run_folder.results
    if until is not None:
        command += ["--until", until]
        result = run_folder.record(loaded.phase_names().index(until), until)
    launch_ranks(Work(loaded, run_folder, command, result, resume), options)


@command("ds-distill check my.yaml task.data.path=my/data")
def check(given: Given) -> None:
    """Find all mistakes in a recipe, its data and models, before anything starts."""
    try:
        loaded = given.load()
    except UserError:
        say("Phases, models and data are looked at once these are mended: there may be more.")
        raise
    if loaded.padding != "never":  # whether a model can do without is asked of a small copy
        import_without_torch()
    quiet_libraries()
    from ds_distill.check.check import check_all

    counts: list[str] = []
    with announced(partial(say, error=True)):
        notes = check_all(loaded, print_reading, counts.append)
    say(f"{given.recipe}: no mistakes found. {len(loaded.phases)} phases: ", end="")
    say(", ".join(loaded.phase_names()) + ".")
    for line in counts:
        say(line)
    for note in notes:
        say(f"Note: {note}")


@command("ds-distill recipes quickstart > my.yaml")
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe.", metavar="NAME")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")
    ] = False,
) -> None:
    """List the built-in recipes, or print one to start your own from.

    [--small] stands behind those that have a small form, for a first try in minutes.
    """
    from ds_distill.recipe import Recipe, builtin_recipes, load_recipe, recipe_path, small_form

    if schema:
        say(json.dumps(Recipe.model_json_schema(), indent=2))
        return
    if name is not None:
        say(recipe_path(name).read_text(encoding="utf-8"), end="")
        return
    width = max(len(name) for name in builtin_recipes())
    for name, path in builtin_recipes().items():
        small = "  [--small]" if small_form(path).is_file() else ""
        say(f"{name:<{width}}  {load_recipe(name).description}{small}")


@command("ds-distill route my.yaml --folder runs/my-run")
def route(
    given: Given,
    folder: FolderOption = None,
) -> None:
    """Compare all routing policies on a run's cache, and choose the best.

    Loads no model and trains nothing. Policies that learn from the split are compared by
    cross-validation. The recipe's expertise phase names the split; a cache phase must store it.
    Train with the best policy: phases.distil.routing=chosen.
    """
    loaded = given.load()
    quiet_libraries()
    from ds_distill.phases.expertise import route as compare_policies

    compare_policies(loaded, folder or Path("runs") / loaded.name)


@command("ds-distill plan my.yaml --gpus 8 --gpu h100")
def plan(
    given: Given,
    gpus: Annotated[int, typer.Option(help="Number of GPUs, or of CPU processes.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Kind of GPU, such as h200, h100, a100, l4; or cpu, by speeds that are assumed.",
            show_default="this machine's",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the plan to this file, too.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every way of running a phase, not the recipe's own.")
    ] = False,
) -> None:
    """Will it fit, how long will it take, does a cache pay? Loads no weights.

    For each phase that trains: what each GPU holds with live teachers, whole or sharded, and with
    cached ones, at all ZeRO stages; the largest micro-batch that fits; an estimate of a step's
    time.
    """
    loaded = given.load()
    quiet_libraries()
    from ds_distill.planning.gpus import find_device
    from ds_distill.planning.planner import Planner
    from ds_distill.planning.table import plan_text

    made = Planner(loaded, find_device(gpu, gpus), gpus).plan()
    say(plan_text(made, every), end="")
    if json is not None:
        write_json_output(json, made.to_json())


@command("ds-distill profile quickstart; ds-distill profile runs/quickstart")
def profile(
    given: Given,
    steps: Annotated[
        int, typer.Option(min=5, help="Optimizer steps of each training to measure.")
    ] = 24,
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
) -> None:
    """Where time and memory go: of each training of a recipe, or of a finished run's models.

    Of a recipe each training runs for some steps, on few examples, as it would: the time of data,
    each live teacher, routing, student, backward pass, communication and optimizer; tokens a
    second, operations, memory. A launcher may start it on several ranks:
    deepspeed --num_gpus 8 --module ds_distill profile RECIPE --folder FOLDER.

    Of a run, whose folder is in place of RECIPE: size, latency, throughput and score of teachers
    and students.
    """
    from ds_distill.reporting.figures import check_figure

    run = Path(given.recipe)
    if figure is not None:
        check_figure(figure)
    if not (run / "recipe.yaml").is_file():
        if figure is not None:
            raise UserError(f"--figure {figure}: is of a finished run's models. Leave it out.")
        _trainings(given, steps, folder, json)
        return
    quiet_libraries()
    from ds_distill.profiling.models import models_tables, plot_models, profile_models

    found = profile_models(run, partial(say, error=True))
    _show({"models": found}, models_tables(found), json)
    if figure is not None:
        plot_models(found, figure)


def _trainings(given: Given, steps: int, folder: Path | None, json: Path | None) -> None:
    whole = given.load()
    quiet_libraries()
    from ds_distill.check.check import open_sources
    from ds_distill.profiling.trainings import profile_trainings, shortening, trainings_tables

    splits = {task: source.splits for task, source in open_sources(whole).items()}
    short = given.load(more=shortening(whole, steps, splits))
    sentence = (
        f"A short run: {steps} steps of each training beside those that warm up, on few examples. "
        "What it says of their quality means nothing."
    )
    work = folder or Path("runs") / f"{short.name}-profile"
    try:
        found = profile_trainings(short, work, partial(say, sentence, error=True))
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    if found:  # of the first rank
        tables = trainings_tables(found, get_world_size())
        _show({"recipe": short.name, "trainings": found}, tables, json)


def _show(content: dict[str, Any], tables: Iterable[Table], json: Path | None) -> None:
    import torch

    from ds_distill.run.inputs import describe_environment

    say("\n" + "\n\n".join(table.text() for table in tables))
    if json is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        environment = describe_environment(get_world_size(), device)
        write_json_output(json, {"environment": environment, **content})
