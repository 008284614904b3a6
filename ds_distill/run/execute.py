"""Run a recipe's phases in order, each once."""

from __future__ import annotations

import time
from pathlib import Path

import datasets
import transformers

from ds_distill.check.recipe import check_data, check_recipe, notes, open_sources
from ds_distill.engine.precision import resolved_name
from ds_distill.engine.world import World
from ds_distill.files import write_json
from ds_distill.parts.phases import PHASES, PhaseSettings
from ds_distill.parts.tasks import TASKS
from ds_distill.recipe import Recipe
from ds_distill.run.context import Run
from ds_distill.run.environment import describe_environment
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.publish import publish


def execute(
    recipe: Recipe, path: Path, *, resume: bool = False, first: int | None = None
) -> dict[str, Run]:
    """Run a recipe in the folder `path`. Returns the run as each task finds it, by task.

    first: run only the first phases, this many; None runs all and publishes.

    Raises UserError for mistakes that the user can fix; nothing is written then.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    folder = RunFolder(path)
    world = World.start()
    folder.check_new_or_same(recipe, resume)
    check_recipe(recipe, num_ranks=world.size, on_gpu=world.device.type == "cuda")
    _import_parts(recipe)
    sources = open_sources(recipe)
    if world.is_main and not resume:
        print("Reading the data ...", flush=True)
        check_data(recipe, sources)
    world.barrier()  # a mistake found by the main process must not leave a folder behind
    if world.is_main:
        folder.create(recipe, describe_environment(world.size, str(world.device)))
    world.barrier()
    log = RunLog(path, recipe, enabled=world.is_main, resumed=resume)
    runs = {name: Run(recipe, folder, world, log, source, name) for name, source in sources.items()}
    if resolved_name(recipe.deepspeed) != recipe.deepspeed:
        log.info(f"deepspeed: {recipe.deepspeed} is {resolved_name(recipe.deepspeed)} here")
    for note in notes(recipe, sources) if world.is_main and not resume else ():
        log.info(f"Note: {note}")
    try:
        for number, (phase, name) in enumerate(
            zip(recipe.phases[:first], recipe.phase_names(), strict=False)
        ):
            title = f"[{number + 1}/{len(recipe.phases)}] {name}"
            if folder.read_record(number, name) is not None:
                log.info(f"{title}: done before")
                continue
            log.info(title)
            _run_phase(phase, number, name, runs[recipe.task_name(phase)])
        if world.is_main and first is None:
            publish(recipe, folder, log)
        world.barrier()
    finally:
        log.close()
    return runs


def _run_phase(phase: PhaseSettings, number: int, name: str, run: Run) -> None:
    """Run a phase and write its record. Every rank must call this."""
    run.log.start_phase(number)
    started = time.perf_counter()
    record = PHASES[phase.kind].load()(phase, number, name, run)
    seconds = round(time.perf_counter() - started, 2)
    run.log.event("phase", phase=name, kind=phase.kind, seconds=seconds)
    if run.world.is_main:
        about = {"phase": name, "kind": phase.kind, "task": run.task_name, "seconds": seconds}
        write_json(run.folder.record(number, name), {**about, **record})
    run.world.barrier()


def _import_parts(recipe: Recipe) -> None:
    """Import the implementations of all parts that a recipe uses, so that one that is not there is
    found before hours of work. Raises UserError."""
    for phase in recipe.phases:
        parts = (entry for _, entry, _ in phase.parts())
        for entry in (PHASES[phase.kind], TASKS[recipe.task_of(phase).type], *parts):
            if entry.implementation is not None:
                entry.load()
