"""Memory ran out: which part of the run it was, and what to change."""

from __future__ import annotations

from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.engine.config import batch_shape, zero_stage
from ds_distill.engine.world import World
from ds_distill.errors import UserError, first_line
from ds_distill.planning.gpus import Device, own_gpu
from ds_distill.planning.planner import Planner
from ds_distill.planning.units import GIB
from ds_distill.process.activity import activity
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, Distil, Evaluate, PhaseSettings, TrainingPhase
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.run import Run


def memory_refusal(error: BaseException, phase: PhaseSettings, name: str, run: Run) -> UserError:
    """The error for the user, raised where memory ran out in a phase."""
    now = activity()
    step = f"at step {now.step}, " if now.step is not None else ""
    return UserError(
        f"phases.{name}: memory ran out on rank {run.world.rank} ({run.world.device}), {step}where "
        f"it {now.what}: {first_line(error)} Finished work is saved. {_advice(phase, name, run)} "
        "micro_batch_size and batch_size of a phase that trains nothing may change with --resume; "
        "for the others begin a new run."
    )


def _advice(phase: PhaseSettings, name: str, run: Run) -> str:
    """What takes less memory, the mildest change first."""
    at, ways = f"phases.{name}", []
    if isinstance(phase, TrainingPhase):
        if (micro := batch_shape(phase, run.world.size)[0]) > 1:
            ways.append(f"set {at}.micro_batch_size below {micro} (the steps stay as they are)")
    elif isinstance(phase, Evaluate | Cache):
        ways.append(f"set {at}.batch_size below {phase.batch_size or PADDED_BATCH}")
    if isinstance(phase, Distil) and phase.teachers == "live":
        ways.append(f"train from a cache ({at}.teachers=cached)")
    if run.world.size > 1 and zero_stage(run.deepspeed()) < 3:
        ways.append("shard the models (deepspeed=zero3_bf16)")
    ways.append(f"set a shorter {run.task.location}.max_length than {run.task.max_length}")
    listed = "; or ".join(ways)
    return f"{listed[0].upper()}{listed[1:]}."


def planned_device(world: World) -> Device | None:
    """The GPU that this rank computes on; None for one that is not known, and for a CPU, on which
    memory is seldom what a run lacks."""
    if world.device.type != "cuda":
        return None
    return own_gpu(world.device)


def planned_memory(
    recipe: Recipe, folder: RunFolder, device: Device, ranks: int, log: RunLog
) -> dict[tuple[int, str], int]:
    """Bytes of each training that is still to do, by its phase's number and its model; warns of
    each phase that does not fit. Main process only."""
    names = recipe.phase_names()
    left = {name: n for n, name in enumerate(names) if not folder.record(n, name).is_file()}
    if not left:
        return {}
    try:
        plan = Planner(recipe, device, ranks).plan()
    except Exception as error:  # whatever a model is that cannot be planned, it may well be trained
        what = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        log.info(f"Note: there is no plan. {what}{error}")
        return {}
    too_large = []
    for job in plan.jobs:
        if not job.chosen.fits:
            micro = job.chosen.largest_micro_batch
            fix = f"A micro_batch_size of {micro}" if micro else "`ds-distill plan` shows what"
            too_large.append((job.phase, job.chosen.total, f" {fix} would."))
    too_large += [(cache.phase, cache.memory, "") for cache in plan.caches if not cache.fits]
    for phase, memory, fix in too_large:
        if phase in left:
            log.info(
                f"Note: phase {phase} may not fit: planned are {memory / GIB:.1f} GiB on each "
                f"{device.name}, which has {device.usable / GIB:.1f} to use.{fix}"
            )
    return {
        (left[job.phase], model): job.chosen.total
        for job in plan.jobs
        if job.phase in left
        for model in job.models
    }
