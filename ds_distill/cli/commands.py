"""`ds-distill`: one thin function per command."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ds_distill import __version__
from ds_distill.cli.cache import cache_app
from ds_distill.cli.evaluate import evaluate
from ds_distill.cli.export import export
from ds_distill.cli.init import init
from ds_distill.cli.loading import (
    execute_recipe,
    go_offline,
    import_without_torch,
    phases_until,
    print_reading,
    quiet_libraries,
    text_output,
    write_json_output,
)
from ds_distill.cli.options import (
    FolderOption,
    Given,
    Resumable,
    ResumeOption,
    with_options,
)
from ds_distill.cli.profile import profile
from ds_distill.cli.push import push
from ds_distill.cli.report import report
from ds_distill.cli.suite import suite
from ds_distill.cli.sweep import sweep
from ds_distill.errors import UserError
from ds_distill.launch import LaunchOptions, Work
from ds_distill.launch import launch as launch_ranks
from ds_distill.process.activity import announced
from ds_distill.process.identity import get_rank
from ds_distill.process.terminal import say

UntilOption = Annotated[
    str | None,
    typer.Option(metavar="PHASE", help="End after this phase; --resume does the others."),
]

app = typer.Typer(
    name="ds-distill",
    help="Distil large encoder teachers into a small student, in one DeepSpeed engine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

app.add_typer(cache_app, name="cache")


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


@app.command(
    cls=Resumable,
    epilog="Example: ds-distill run tweeteval-emotion task.data.path=my/tweets seed=1",
)
@with_options
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
        try:
            push(path, push_to_hub)
        except UserError as error:
            again = f"push it with: ds-distill push {path} {push_to_hub}"
            raise UserError(f"{error} The run is finished; {again}") from error


app.command(
    epilog="Example: ds-distill init tickets --teacher models/bert --teacher models/roberta"
)(with_options(init))


@app.command(
    epilog="Example: ds-distill quickstart --folder runs/first-try",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def quickstart(context: typer.Context) -> None:
    """Two teachers, a small student of each routing, and a control; real text, no GPU needed.

    Minutes on two cores. The same as `run quickstart`, with its options and changes of keys.
    """
    app(["run", "quickstart", *context.args], prog_name="ds-distill", standalone_mode=False)


app.command(epilog="Example: ds-distill sweep my.yaml seed=1,2,3 phases.distil.epochs=3,6")(
    with_options(sweep)
)


app.command(
    epilog="Example: ds-distill suite compact-biomedical runs/mine runs/other data_folder=data "
    "--reference other --jobs 4"
)(with_options(suite))


@app.command(
    cls=Resumable, epilog="Example: ds-distill launch my.yaml --num-gpus 8 deepspeed=zero3_bf16"
)
@with_options
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


@app.command(epilog="Example: ds-distill check my.yaml task.data.path=my/data")
@with_options
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


@app.command(epilog="Example: ds-distill recipes quickstart > my.yaml")
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


@app.command(epilog="Example: ds-distill route my.yaml --folder runs/my-run")
@with_options
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


@app.command(epilog="Example: ds-distill status runs/my-run")
def status(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
) -> None:
    """What came of a run, and what to do next.

    Exit codes: 0 it is finished; 3 it runs; 75 it can go on; 2 or 1 it has failed, as its own.
    """
    from ds_distill.run.folder import RunFolder

    code, text = RunFolder(folder).status()
    say(text)
    raise typer.Exit(code)


app.command(
    epilog="Example: ds-distill evaluate runs/mine my.yaml --split test; "
    "ds-distill evaluate google-bert/bert-base-uncased my.yaml --task sentiment"
)(evaluate)
app.command(epilog="Example: ds-distill export runs/mine --onnx --int8")(with_options(export))
app.command(epilog="Example: ds-distill push runs/mine me/tickets-student --dry-run")(push)
app.command(epilog="Example: ds-distill report runs/first runs/second --output both.html")(report)


@app.command(epilog="Example: ds-distill predict runs/quickstart texts.txt > predictions.jsonl")
def predict(
    model: Annotated[
        str, typer.Argument(metavar="STUDENT", help="A run's folder, a model's, or a hub id.")
    ],
    file: Annotated[
        Path,
        typer.Argument(
            help="jsonl, csv, tsv, parquet, conll or txt, plain or gzip; - is standard input: an "
            "object of JSON or a text on each line."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="standard output")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Column of the text, or of the question.",
            show_default="text, tokens, question or text_a",
        ),
    ] = None,
    text_b: Annotated[
        str | None, typer.Option(help="Column of the second text of a pair, or of the context.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per forward pass.")] = 32,
) -> None:
    """Label the texts of a file, or answer its questions: a line of JSON each, the row with its
    prediction."""
    if output is not None and output.is_file() and file.is_file() and output.samefile(file):
        raise UserError(f"--output {output}: is the file of the texts. Name another one.")
    go_offline([model])
    with text_output(output) as target:
        quiet_libraries()
        from ds_distill.predictors.file import predict_file

        predict_file(
            model,
            file,
            target,
            text=text,
            text_b=text_b,
            batch_size=batch_size,
            progress=partial(say, error=True),
        )


@app.command(epilog="Example: ds-distill plan my.yaml --gpus 8 --gpu h100")
@with_options
def plan(
    given: Given,
    gpus: Annotated[int, typer.Option(help="Number of GPUs, or of CPU processes.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Kind of GPU, such as h200, h100, a100, l4; or cpu, measured on this machine.",
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


app.command(epilog="Example: ds-distill profile quickstart; ds-distill profile runs/quickstart")(
    profile
)
