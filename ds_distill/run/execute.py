"""Run a recipe's phases in order, each once."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datasets
import transformers

from ds_distill.check.check import check_data, check_recipe, notes, open_sources
from ds_distill.engine.config import find_config
from ds_distill.engine.precision import check_device, resolved_name
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.files import write_json
from ds_distill.process.activity import mark_phase
from ds_distill.process.failures import clear_failures, first_failure
from ds_distill.process.identity import restarts
from ds_distill.process.peak_memory import is_out_of_memory
from ds_distill.process.signals import end_locked_out
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import PhaseSettings
from ds_distill.run.doubts import score_teachers
from ds_distill.run.events import RunLog
from ds_distill.run.folder import Resume, RunFolder
from ds_distill.run.inputs import (
    check_inputs,
    describe_environment,
    inputs_of,
    refuse_other_inputs,
    refuse_other_start,
)
from ds_distill.run.memory import memory_refusal, planned_device, planned_memory
from ds_distill.run.observer import Observer
from ds_distill.run.publish import publish, report_stopped
from ds_distill.run.rank import as_rank
from ds_distill.run.run import Run


def execute(
    recipe: Recipe,
    path: Path,
    *,
    resume: Resume = False,
    first: int | None = None,
    observer: Observer | None = None,
) -> dict[str, Run]:
    """Run a recipe in the folder `path`. Returns the run as each task finds it, by task.

    first: run only the first phases, this many; None runs all and publishes.
    observer: observes the trainings.

    Raises UserError for mistakes that the user can fix; nothing is written then.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    started = time.time()
    with as_rank(path, recipe.timeout_minutes * 60) as world:
        attempt: dict[str, Any] = {}
        if world.is_main:
            RunFolder(path).check_new_or_same(recipe, resume)
            attempt = _attempt(path)
            clear_failures(path, before=started)
        refuse_other_start(recipe, world)
        folder = RunFolder(path)
        return _execute(recipe, folder, world, attempt, resume, first, observer)


def _execute(
    recipe: Recipe,
    folder: RunFolder,
    world: World,
    attempt: dict[str, Any],
    resume: Resume,
    first: int | None,
    observer: Observer | None,
) -> dict[str, Run]:
    check_recipe(recipe, num_ranks=world.size, on_gpu=world.device.type == "cuda")
    check_device(*find_config(recipe.deepspeed))
    _import_parts(recipe)
    sources = open_sources(recipe)
    resumed = folder.goes_on(resume)
    if world.is_main and not resumed:
        print("Reading the data ...", flush=True)
        check_data(recipe, sources)
    inputs = inputs_of(recipe, sources)
    refuse_other_inputs(inputs, world)
    world.barrier()  # a mistake found by any rank must not leave a folder behind
    changed = folder.changes(recipe) if world.is_main else []
    with _prepared(recipe, folder, world, attempt, resume):
        replaced = check_inputs(inputs, folder) if world.is_main else []
        log = RunLog(folder.path, recipe, enabled=world.is_main, resumed=resumed)
        runs = {
            name: Run(recipe, folder, world, log, source, name, observer)
            for name, source in sources.items()
        }
        if attempt:
            log.info("Attempt {attempt}, after {after}".format(**attempt))
        if resolved_name(recipe.deepspeed) != recipe.deepspeed:
            log.info(f"deepspeed: {recipe.deepspeed} is {resolved_name(recipe.deepspeed)} here")
        for change in changed:
            log.info(f"Changed: {change}")
        for note in [*replaced, *(notes(recipe, sources) if world.is_main and not resumed else ())]:
            log.info(f"Note: {note}")
        device = planned_device(world)
        if world.is_main and device is not None:
            planned = planned_memory(recipe, folder, device, world.size, log)
            for run in runs.values():
                run.planned_bytes = planned
        gc.freeze()  # libraries' objects: half a second of each collection between trainings
        try:
            _run_phases(recipe, folder, log, runs, first)
            if world.is_main and first is None:
                mark_phase("publish")
                publish(recipe, folder, world.device, log)
            world.barrier()
        except (Exception, KeyboardInterrupt) as error:
            if world.is_main and not folder.results.is_file():
                with suppress(Exception):  # what stopped the run is what its user must see
                    report_stopped(recipe, folder, str(error) or type(error).__name__)
            raise
        finally:
            gc.unfreeze()
            log.close()
    return runs


def _attempt(path: Path) -> dict[str, Any]:
    """Of a start by torchrun after another one: which, and what has ended that one."""
    if not restarts():
        return {}
    after = first_failure(path) or "a rank was killed"
    return {"attempt": restarts(), "after": str(after)}


@contextmanager
def _prepared(
    recipe: Recipe, folder: RunFolder, world: World, attempt: dict[str, Any], resume: Resume
) -> Iterator[None]:
    """Inside this block the run has its folder, and no other run has."""
    if not world.is_main:
        world.barrier()
        folder.check_seen(world.rank)
        yield
        return
    with folder.leased(end_locked_out, waits=resume == "auto"):
        folder.check_new_or_same(recipe, resume)  # again: another run may have just ended
        folder.create(recipe, {**describe_environment(world.size, str(world.device)), **attempt})
        world.barrier()
        yield


def _run_phases(
    recipe: Recipe, folder: RunFolder, log: RunLog, runs: dict[str, Run], first: int | None
) -> None:
    phases = recipe.named_phases()[:first]
    world = next(iter(runs.values())).world
    # Of rank 0: a slow rank must not find what a fast one wrote in the meantime, and one that has
    # looked for a record may be told for a while that there is none.
    done = world.from_main(
        lambda: [folder.read_record(at, name) is not None for at, (name, _) in enumerate(phases)]
    )
    starts = folder.read_environment()["starts"] if world.is_main else []
    if len(counts := sorted({start["ranks"] for start in starts})) > 1:
        log.info(
            f"Note: on {world.size} rank(s); {' and '.join(map(str, counts))} were used in this "
            "run. Sums are taken in another order then, so results differ by rounding."
        )
    if sum(not one for one in done) > 1:
        log.info(f"Phases: {', '.join(recipe.phase_names())}.")
    for number, (name, phase) in enumerate(phases):
        title = f"[{number + 1}/{len(recipe.phases)}] {name}"
        if done[number]:
            log.info(f"{title}: done before")
            continue
        log.info(title)
        _run_phase(phase, number, name, runs[recipe.task_name(phase)])


def _run_phase(phase: PhaseSettings, number: int, name: str, run: Run) -> None:
    """Run a phase and write its record. Every rank must call this."""
    gc.collect()  # what the last phase's engine held, which is a cycle
    before = run.log.start_phase(number, name)
    mark_phase(name)
    started = time.perf_counter()
    run.peak_memory.begin_phase()
    try:
        score_teachers(number, name, run)
        record = phase.load()(phase, number, name, run)
    except Exception as error:
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        raise memory_refusal(error, phase, name, run) from error
    finally:
        with suppress(Exception):  # what ends a phase is what its user must see
            run.log.event("end", phase=name)
    seconds = round(before + time.perf_counter() - started, 2)
    run.log.event("phase", phase=name, kind=phase.kind, seconds=seconds)
    if run.world.is_main:
        about = {"phase": name, "kind": phase.kind, "task": run.task_name, "seconds": seconds}
        about["peak_bytes"] = run.peak_memory.of_phase()
        write_json(run.folder.record(number, name), {**about, **(record or {})})
    run.world.barrier()


def _import_parts(recipe: Recipe) -> None:
    """Import the implementations of all parts that a recipe uses, so that one that is not there is
    found before hours of work. Raises UserError."""
    for phase in recipe.phases:
        for part in (phase, recipe.task_of(phase), *(part for _, part in phase.parts())):
            if part.runs is not None:
                part.load()
