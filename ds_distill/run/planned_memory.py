"""What the trainings of a run are planned to hold on its GPUs, with a warning where it is too
much."""

from __future__ import annotations

from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.planning.gpus import GIB, Device, own_gpu
from ds_distill.planning.planner import Planner
from ds_distill.recipe import Recipe
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder


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
    left = {
        name: number
        for number, name in enumerate(names)
        if not folder.record(number, name).is_file()
    }
    if not left:
        return {}
    try:
        plan = Planner(recipe, device, ranks).plan()
    except Exception as error:  # whatever a model is that cannot be planned, it may well be trained
        what = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        log.info(f"Note: there is no plan. {what}{error}")
        return {}
    of_caches = [(cache.phase, cache.memory, "") for cache in plan.caches if not cache.fits]
    too_large = [
        (
            job.phase,
            job.chosen.total,
            f" A micro_batch_size of {micro} would."
            if (micro := job.chosen.largest_micro_batch)
            else " `ds-distill plan` shows what would.",
        )
        for job in plan.jobs
        if not job.chosen.fits
    ]
    for phase, memory, fix in too_large + of_caches:
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
