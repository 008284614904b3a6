"""Which placement of teachers to take, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ds_distill.planning.gpus import GIB
from ds_distill.planning.plan import BreakEven, JobPlan, Placement, Plan
from ds_distill.planning.units import duration


def advice(plan: Plan) -> Iterator[str]:
    """A line for each training with teachers: what to take, and time and memory of each way."""
    for job in plan.jobs:
        if job.chosen.choice.teachers is not None:
            yield _of_job(job, next((o for o in plan.break_even if o.phase == job.phase), None))


def _of_job(job: JobPlan, pays: BreakEven | None) -> str:
    """pays: None where no cache can hold what the phase asks of its teachers."""
    ways = {
        "whole teachers on each GPU": _best(job, "live", (0, 1, 2)),
        "sharded teachers": _best(job, "live", (3,)),
        "cached teachers": _best(job, "cached", (0, 1, 2, 3)),
    }
    fitting = {way: one for way, one in ways.items() if one is not None and one.fits}
    if not fitting:
        return (
            f"{job.phase}: nothing fits. Take larger GPUs or more of them, smaller micro-batches, "
            f"or smaller models. {_each(ways)}."
        )
    cached = fitting.pop("cached teachers", None)
    fastest = min(fitting, key=lambda way: fitting[way].step.total, default=None)
    saved = 0.0  # seconds of a step
    if cached is not None and fastest is not None:
        saved = fitting[fastest].step.total - cached.step.total
    if cached is not None and (
        fastest is None or (pays and pays.in_recipe > pays.passes_saving(saved))
    ):
        taken, why, one = "cached teachers", "", cached
    else:
        assert fastest is not None
        taken, one = fastest, fitting[fastest]
        why = "" if cached is None else ", because a cache does not pay"
    return f"{job.phase}: take {taken}, at stage {one.choice.stage}{why}. {_each(ways)}."


def _best(job: JobPlan, teachers: str, stages: tuple[int, ...]) -> Placement | None:
    """The fastest that fits, or the smallest where none does; with activation checkpointing as the
    recipe has it."""
    checkpointing = job.chosen.choice.checkpointing
    found = [
        one
        for one in job.others
        if (one.choice.teachers, one.choice.checkpointing) == (teachers, checkpointing)
        and one.choice.stage in stages
    ]
    fitting = [one for one in found if one.fits]
    if fitting:
        return min(fitting, key=lambda one: (one.step.total, one.total))
    return min(found, key=lambda one: one.total, default=None)


def _each(ways: dict[str, Placement | None]) -> str:
    return "; ".join(
        f"{way} (stage {one.choice.stage}): {duration(one.step.total)} a step, "
        f"{one.total / GIB:.1f} GiB{'' if one.fits else ', which does not fit'}"
        for way, one in ways.items()
        if one is not None
    )
