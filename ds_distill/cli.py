"""`ds-distill`: one thin function per command."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ds_distill import __version__
from ds_distill.errors import UserError
from ds_distill.files import is_disk_full
from ds_distill.launch.options import LaunchOptions, with_launch_options
from ds_distill.run.stopping import (
    STOPPED,
    Stopped,
    end_as_rank,
    exit_on_signal,
    is_rank,
    print_error,
)

app = typer.Typer(
    name="ds-distill",
    help="Distil large encoder teachers into a small student, in one DeepSpeed engine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

cache_app = typer.Typer(
    help="Cache teacher signals: run the teachers once, train any number of students from it.",
    no_args_is_help=True,
)
app.add_typer(cache_app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ds-distill {__version__}")
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


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a built-in recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Change keys of the recipe, e.g. training.epochs=1 phases.distil.teachers=live",
    ),
]
SmallOption = Annotated[
    bool,
    typer.Option(
        "--small", help="Lay the recipe's small form over it: small/FILE beside its file."
    ),
]
FolderOption = Annotated[
    Path | None, typer.Option(help="The run's folder.", show_default="runs/NAME")
]
CacheArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A cache's folder, or a run's with caches in it.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue the run in the folder where it stopped.")
]


@app.command(epilog="Example: ds-distill run tweeteval-emotion task.data.path=my/tweets seed=1")
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    small: SmallOption = False,
    folder: FolderOption = None,
    resume: ResumeOption = False,
) -> None:
    """Run a recipe: all its phases, in this process (or as one rank of a launched run)."""
    loaded = _load(recipe, overrides, small)
    _execute(loaded, folder or Path("runs") / loaded.name, resume=resume)


@app.command(epilog="Example: ds-distill quickstart --folder runs/first-try")
def quickstart(
    overrides: Overrides = None, folder: FolderOption = None, resume: ResumeOption = False
) -> None:
    """Two teachers, a small student of each routing, and a control; real text, no GPU needed."""
    run("quickstart", overrides, folder=folder, resume=resume)


@app.command(epilog="Example: ds-distill launch my.yaml --num-gpus 8 deepspeed=zero3_bf16")
@with_launch_options
def launch(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    small: SmallOption = False,
    folder: FolderOption = None,
    resume: ResumeOption = False,
    *,
    options: LaunchOptions,
) -> None:
    """Run a recipe on many ranks: of this machine, of several, or of a Slurm job.

    On several machines the folder must be on a file system that all of them see.
    """
    from ds_distill.launch.launch import launch_run
    from ds_distill.run.folder import RunFolder

    loaded = _load(recipe, overrides, small)
    run_folder = RunFolder((folder or Path("runs") / loaded.name).absolute())
    launch_run(_as_given(recipe, overrides, small), loaded, run_folder, options, resume=resume)


@app.command(epilog="Example: ds-distill check my.yaml task.data.path=my/data")
def check(recipe: RecipeArgument, overrides: Overrides = None, small: SmallOption = False) -> None:
    """Find all mistakes in a recipe, its data and models, before anything starts."""
    loaded = _load(recipe, overrides, small)
    _import_without_torch()
    _quiet_libraries()
    from ds_distill.check.recipe import check_all

    notes = check_all(loaded, _reading)
    typer.echo(f"{recipe}: no mistakes found. {len(loaded.phases)} phases: ", nl=False)
    typer.echo(", ".join(loaded.phase_names()) + ".")
    for note in notes:
        typer.echo(f"Note: {note}")


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
    if schema:
        from ds_distill.recipe.json_schema import schema_text

        typer.echo(schema_text(), nl=False)
        return
    from ds_distill.recipe import builtin_recipes, load_recipe, recipe_path, small_form

    if name is not None:
        typer.echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)
        return
    width = max(len(name) for name in builtin_recipes())
    for name, path in builtin_recipes().items():
        small = "  [--small]" if small_form(path).is_file() else ""
        typer.echo(f"{name:<{width}}  {load_recipe(name).description}{small}")


@app.command(epilog="Example: ds-distill route my.yaml --folder runs/my-run")
def route(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    small: SmallOption = False,
    folder: FolderOption = None,
) -> None:
    """Compare all routing policies on a run's cache, and choose the best.

    Loads no model and trains nothing. Policies that learn from the split are compared by
    cross-validation. The recipe's expertise phase names the split; a cache phase must store it.
    Train with the best policy: phases.distil.routing=chosen.
    """
    from ds_distill.phases.expertise import route as compare_policies

    loaded = _load(recipe, overrides, small)
    _quiet_libraries()
    compare_policies(loaded, folder or Path("runs") / loaded.name)


@app.command(epilog="Example: ds-distill predict runs/quickstart texts.txt > predictions.jsonl")
def predict(
    model: Annotated[
        str, typer.Argument(metavar="STUDENT", help="A run's folder, a model's, or a hub id.")
    ],
    file: Annotated[
        Path,
        typer.Argument(
            help="jsonl, csv, tsv, parquet or txt, plain or gzip; - is standard input: an object "
            "of JSON or a text on each line."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="standard output")
    ] = None,
    text: Annotated[str, typer.Option(help="Column of the text.")] = "text",
    text_b: Annotated[str | None, typer.Option(help="Column of the second text of a pair.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per forward pass.")] = 32,
) -> None:
    """Label the texts of a file: a line of JSON each, the row with its prediction."""
    from ds_distill.files import new_file
    from ds_distill.prediction import predict_file

    def progress(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    _quiet_libraries()
    with contextlib.ExitStack() as stack:
        target = sys.stdout
        if output is not None:
            aside = stack.enter_context(new_file(output))
            target = stack.enter_context(open(aside, "w", encoding="utf-8"))
        predict_file(
            model,
            file,
            target,
            text=text,
            text_b=text_b,
            batch_size=batch_size,
            progress=progress,
        )


@app.command(epilog="Example: ds-distill plan my.yaml --gpus 8 --gpu h100 --figure plan.svg")
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    small: SmallOption = False,
    gpus: Annotated[int, typer.Option(help="Number of GPUs, or of CPU processes.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Kind of GPU, such as h200, h100, a100, l4; or cpu, measured on this machine.",
            show_default="this machine's",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the plan to this file, too.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw memory and speed on up to 1,024 GPUs (.svg).")
    ] = None,
) -> None:
    """Will it fit, how long will it take, does a cache pay? Loads no weights.

    For each phase that trains: what each GPU holds with live teachers, whole or sharded, and with
    cached ones, at all ZeRO stages; the largest micro-batch that fits; an estimate of a step's
    time.
    """
    loaded = _load(recipe, overrides, small)
    _quiet_libraries()
    from ds_distill.files import write_json
    from ds_distill.planning.figures import plot_curves
    from ds_distill.planning.gpus import find_device
    from ds_distill.planning.planner import Planner
    from ds_distill.planning.table import plan_text

    planner = Planner(loaded, find_device(gpu, gpus), gpus)
    made = planner.plan()
    typer.echo(plan_text(made), nl=False)
    if json is not None:
        write_json(json, made.to_json())
    if figure is not None:
        plot_curves(planner, figure)


@cache_app.command("build", epilog="Example: ds-distill cache build my.yaml --num-gpus 8")
@with_launch_options
def cache_build(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    small: SmallOption = False,
    folder: FolderOption = None,
    *,
    options: LaunchOptions,
) -> None:
    """Run a recipe up to its last cache phase; after a stop, the same command continues.

    Examples that a shared cache (phases.cache.folder) has already are not run again.
    Train from it: ds-distill run RECIPE --resume.
    """
    from ds_distill.run.folder import RunFolder

    loaded = _load(recipe, overrides, small)
    caches = _cache_phases(loaded)
    run_folder = RunFolder((folder or Path("runs") / loaded.name).absolute())
    if options.any_given():
        from ds_distill.launch.launch import launch_build

        launch_build(_as_given(recipe, overrides, small), loaded, run_folder, options)
    else:
        _execute(loaded, run_folder.path, resume=run_folder.holds_run(), first=caches[-1] + 1)


@cache_app.command("compare", epilog="Example: ds-distill cache compare masked-lm")
def cache_compare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    small: SmallOption = False,
    examples: Annotated[
        int, typer.Option(min=2, help="Examples of the cache's first split to measure on.")
    ] = 512,
    folder: FolderOption = None,
) -> None:
    """Compare size and KL divergence of every codec on your own masked-LM teachers.

    Runs the phases before the recipe's first cache phase, unless they are done.
    """
    loaded = _load(recipe, overrides, small)
    numbers = _cache_phases(loaded)
    tasks = {number: loaded.task_of(loaded.phases[number]) for number in numbers}
    number = next((number for number, task in tasks.items() if not task.has_classes), None)
    if number is None:
        raise UserError(
            f"{recipe}: codecs are for distributions over a vocabulary, but the task's type is "
            f"{tasks[numbers[0]].type}. Class logits are stored as they are, 2 bytes each."
        )
    from ds_distill.run.folder import RunFolder

    run_folder = RunFolder(folder or Path("runs") / loaded.name)
    runs = _execute(loaded, run_folder.path, resume=run_folder.holds_run(), first=number)
    done = runs[loaded.task_name(loaded.phases[number])]
    from ds_distill.cache.compare import markdown_table
    from ds_distill.run.codecs import compare

    for teacher, scores in compare(done, number, examples).items():
        typer.echo(f"\n{teacher}, KL(true || decoded) in nats, {scores[0].rows} tokens\n")
        typer.echo(markdown_table(scores), nl=False)
        typer.echo(f"\nPlot     {run_folder.path / 'figures' / f'codecs-{teacher}.svg'}")


@cache_app.command("verify", epilog="Example: ds-distill cache verify runs/quickstart")
def cache_verify(folder: CacheArgument) -> None:
    """Check every byte of a cache against its checksums."""
    from ds_distill.cache.inspect import caches_in
    from ds_distill.cache.reader import CacheReader

    for path in caches_in(folder):
        CacheReader(path).verify()
        typer.echo(f"{path}: all checksums match")


@cache_app.command("info", epilog="Example: ds-distill cache info runs/quickstart")
def cache_info(folder: CacheArgument) -> None:
    """Show what a cache holds, of which teachers, and how large it is."""
    from ds_distill.cache.inspect import caches_in, describe

    for path in caches_in(folder):
        typer.echo(describe(path))


def _load(recipe: str, overrides: list[str] | None, small: bool):  # type: ignore[no-untyped-def]
    from ds_distill.recipe import load_recipe
    from ds_distill.recipe.hub import go_offline_without_hub

    loaded = load_recipe(recipe, overrides or [], small)
    note = go_offline_without_hub(loaded)
    if note is not None and not is_rank():
        print(note, file=sys.stderr, flush=True)
    return loaded


def _as_given(recipe: str, overrides: list[str] | None, small: bool) -> list[str]:
    """The arguments by which a rank reads the same recipe."""
    return [recipe, *(overrides or []), *(["--small"] if small else [])]


def _cache_phases(recipe) -> list[int]:  # type: ignore[no-untyped-def]
    """Numbers of a recipe's cache phases."""
    numbers = [number for number, phase in enumerate(recipe.phases) if phase.kind == "cache"]
    if not numbers:
        raise UserError(
            f"{recipe.name}: no cache phase. Add - cache: {{splits: train}} before the phases "
            "that train from it."
        )
    return numbers


def _execute(recipe, path: Path, *, resume: bool, first: int | None = None):  # type: ignore[no-untyped-def]
    from ds_distill.run.folder import RunFolder

    def message() -> str:
        return RunFolder(path).how_to_continue(*([] if first is not None else ["--resume"]))

    try:
        with exit_on_signal(message):
            from ds_distill.run.execute import execute  # imports deepspeed: seconds

            runs = execute(recipe, path, resume=resume, first=first)
    except Stopped as error:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise
        print_error(f"{error}. {message()}")
        sys.exit(STOPPED)
    except Exception as error:
        if isinstance(error, UserError) or not is_disk_full(error):
            raise
        file = getattr(error, "filename", None) or path
        option = "" if first is not None else " with --resume"
        raise UserError(
            f"no space left on the disk while writing {file}. Finished work is saved: free "
            f"some space, then run the same command{option}."
        ) from error
    if os.environ.get("RANK", "0") == "0" and first is None:
        typer.echo(f"\nReport   {path / 'report.html'}")
        typer.echo(f"Results  {path / 'results.json'}")
        typer.echo(f"Student  {path / 'student'}")
    return runs


def _reading(done: int, files: int) -> None:
    if done == 50:  # extracting docstrings for the first time takes half a minute
        print(f"Reading the docstrings of {files:,} files, once ...", file=sys.stderr, flush=True)


def _import_without_torch() -> None:
    """Import transformers and datasets as if torch were not installed: they read configurations,
    tokenizers and data without it, in a third of the time."""
    if "torch" in sys.modules:
        return
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # about models, which need torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing torch now fails
    try:
        import datasets  # noqa: F401
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]


def _quiet_libraries() -> None:
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def main() -> None:
    """Exit codes: 0 done, 2 the user's input is wrong, 1 a fault of ours; 130 after Ctrl-C, 143
    after SIGTERM, and 75 where that came in a training, which saved a checkpoint."""
    # Two processes on few cores lose half their speed to spinning; must be set before torch.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # it warns and disables itself in forks
    several = is_rank() and int(os.environ["WORLD_SIZE"]) > 1
    if several:  # what a lost connection means is reported once, in words
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if is_rank():
        end_as_rank()
    try:
        with exit_on_signal(lambda: ""):
            app(prog_name="ds-distill", standalone_mode=True)
    except Exception as error:
        if several:
            from ds_distill.run.ranks import report_and_exit

            report_and_exit(error)
        if not isinstance(error, UserError):
            raise
        print(f"ds-distill: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
