"""`ds-distill cache`: one thin function per command."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_distill.cli.loading import execute_recipe
from ds_distill.cli.options import CacheArgument, FolderOption, Given, app, command
from ds_distill.errors import UserError
from ds_distill.launch import LaunchOptions, Work, launch
from ds_distill.process.identity import get_rank, get_world_size
from ds_distill.process.terminal import say

if TYPE_CHECKING:
    from ds_distill.recipe import Recipe

cache_app = typer.Typer(
    help="Cache teacher signals: run the teachers once, train any number of students from it.",
    no_args_is_help=True,
)
app.add_typer(cache_app, name="cache")


@command("ds-distill cache build my.yaml --num-gpus 8", cache_app, name="build")
def cache_build(
    given: Given,
    folder: FolderOption = None,
    worker: Annotated[
        bool,
        typer.Option(
            "--worker",
            help="Build a shared cache (phases.cache.folder) with all others that do: start any "
            "number, on any machines, at any time.",
        ),
    ] = False,
    *,
    options: LaunchOptions,
) -> None:
    """Run a recipe up to its last cache phase; after a stop, the same command continues.

    Examples that a shared cache (phases.cache.folder) has already are not run again.
    Train from it: ds-distill run RECIPE --resume.
    """
    if options.any_given():
        options.check()
    loaded = given.load()
    caches = _cache_phases(loaded)
    default = Path("runs") / loaded.name
    if worker:
        _check_workers(loaded, caches[-1])
        if folder is None and get_world_size() > 1:
            raise UserError("--worker: the ranks of a launcher share a folder: name it by --folder")
        default = default.with_name(f"{loaded.name}-{socket.gethostname()}-{os.getpid()}")
    from ds_distill.run.folder import RunFolder

    run_folder = RunFolder((folder or default).absolute())
    if options.any_given():
        last = run_folder.record(caches[-1], loaded.phase_names()[caches[-1]])
        resume = run_folder.holds_run()
        launch(Work(loaded, run_folder, ["cache", "build"], last, resume, ()), options)
    else:
        execute_recipe(loaded, run_folder.path, resume=run_folder.holds_run(), first=caches[-1] + 1)
    if worker and folder is None and get_rank() == 0:
        shutil.rmtree(run_folder.path, ignore_errors=True)  # what it made lies in the cache


@command("ds-distill cache verify runs/quickstart", cache_app, name="verify")
def cache_verify(folder: CacheArgument) -> None:
    """Check every byte of a cache against its checksums."""
    from ds_distill.cache.reader import CacheReader, caches_in

    for path in caches_in(folder):
        CacheReader(path).verify()
        say(f"{path}: all checksums match")


@command("ds-distill cache info runs/quickstart", cache_app, name="info")
def cache_info(folder: CacheArgument) -> None:
    """Show what a cache holds, of which teachers, and how large it is."""
    from ds_distill.cache.reader import caches_in, describe

    for path in caches_in(folder):
        say(describe(path))


def _check_workers(recipe: Recipe, last: int) -> None:
    """Raises UserError where processes that share only the cache's folder cannot build it.

    last: number of the last cache phase.
    """
    from ds_distill.recipe.phases import Cache

    for name, phase in recipe.named_phases()[: last + 1]:
        if not isinstance(phase, Cache):
            raise UserError(
                f"--worker: phase {name} comes before the cache, and each worker would run it "
                "again. Run it once without --worker, and name the models that it trained "
                f"(teachers.NAME.model=runs/{recipe.name}/models/...) in a recipe without it."
            )
        if phase.folder is None:
            raise UserError(
                f"--worker: phases.{name}.folder is not set, and workers meet in a folder that "
                f"all of them see, e.g. phases.{name}.folder=/shared/caches/{recipe.name}"
            )


def _cache_phases(recipe: Recipe) -> list[int]:
    """Numbers of a recipe's cache phases."""
    numbers = [number for number, phase in enumerate(recipe.phases) if phase.kind == "cache"]
    if not numbers:
        raise UserError(
            f"{recipe.name}: no cache phase. Add - cache: {{splits: train}} before the phases "
            "that train from it."
        )
    return numbers
