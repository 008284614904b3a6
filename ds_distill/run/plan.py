"""The plan of a run on GPUs: a warning before it starts, and beside the truth in its results."""

from __future__ import annotations

from typing import Any

from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.files import write_json
from ds_distill.planning.gpus import GIB, Device, own_gpu
from ds_distill.planning.plan import JobPlan
from ds_distill.planning.planner import Planner
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases.base import training_name
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.records import Plan, read_as
from ds_distill.run.timings import Timings, read_timings


def planned_device(world: World) -> Device | None:
    """The GPU that this rank computes on; None for one that is not known, and for a CPU, on which
    memory is seldom what a run lacks."""
    if world.device.type != "cuda":
        return None
    return own_gpu(world.device)


def plan_run(recipe: Recipe, folder: RunFolder, device: Device, ranks: int, log: RunLog) -> None:
    """Write what the trainings of a run are planned to take, and warn of each that does not fit. A
    resumed run's may take another batch, stage or number of ranks than before: what phases that are
    done were planned to take stays. Main process only."""
    done = {
        name
        for number, name in enumerate(recipe.phase_names())
        if folder.read_record(number, name) is not None
    }
    if len(done) == len(recipe.phases):
        return
    try:
        plan = Planner(recipe, device, ranks).plan()
    except Exception as error:  # whatever a model is that cannot be planned, it may well be trained
        what = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        log.info(f"Note: there is no plan. {what}{error}")
        return
    jobs = [job for job in plan.jobs if job.phase not in done]
    for job in jobs:
        if not job.chosen.fits:
            log.info(f"Note: {_warning(job, device)}")
    for cache in plan.caches:
        if cache.phase not in done and not cache.fits:
            log.info(
                f"Note: phase {cache.phase} may not fit: planned are {cache.memory / GIB:.1f} GiB "
                f"on each {device.name}, which has {device.usable / GIB:.1f} to use."
            )
    before = read_as(folder.plan, Plan)["trainings"] if folder.plan.is_file() else []
    planned = [one for one in before if one["phase"] in done] + [
        {
            "phase": job.phase,
            "model": model,
            "device": device.name,
            "ranks": ranks,
            "planned_bytes": job.chosen.total,
            "planned_step_seconds": job.chosen.step.total,
        }
        for job in jobs
        for model in job.models
    ]
    write_json(folder.plan, {"trainings": planned})


def _warning(job: JobPlan, device: Device) -> str:
    total, usable = job.chosen.total / GIB, device.usable / GIB
    text = (
        f"phase {job.phase} may not fit: planned are {total:.1f} GiB on each {device.name}, which "
        f"has {usable:.1f} to use."
    )
    fits = job.chosen.largest_micro_batch
    if fits:
        return f"{text} A micro_batch_size of {fits} would."
    return f"{text} `ds-distill plan` shows what would."


def plan_and_truth(recipe: Recipe, folder: RunFolder, records: list[Any]) -> dict[str, Any] | None:
    """The plan with what each training took: on rank 0 the seconds of a step, and the most bytes
    that torch had allocated. None where there is no plan.

    records: of the phases, in order.
    """
    if not folder.plan.is_file():
        return None
    plan = read_as(folder.plan, Plan)
    timings = read_timings(folder.path / "metrics.jsonl")
    names = recipe.phase_names()
    for planned in plan["trainings"]:
        number, model = names.index(planned["phase"]), planned["model"]
        timing = timings.get((number, model), Timings())
        trained = {
            training_name(one.get("together", [one["output"]])): one
            for one in records[number].get("trained", [])
        }
        planned["step_seconds"] = sum(timing.seconds.values()) if timing.steps else None
        planned["peak_bytes"] = trained.get(model, {}).get("peak_bytes")
    return plan
