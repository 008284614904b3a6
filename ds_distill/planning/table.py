"""A plan as text for the terminal: which placement of teachers to take, and a table of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from ds_distill.planning.gpus import OF_LINKS, OF_MEMORY, OF_PRODUCTS
from ds_distill.planning.models import PlannedModel
from ds_distill.planning.plan import BreakEven, CachePlan, Choice, JobPlan, Placement, Plan
from ds_distill.planning.units import GIB, amount, duration, gib, rate
from ds_distill.tables import Table

CACHED = "cached teachers"

MOSTLY_WAITS = 0.5
"""Of a step's time, below which a plan says that the GPU waits for Python."""


def _cells(one: Placement) -> dict[str, str]:
    """Of a row, by column: what is held, in GiB, the largest micro-batch, and a step's time."""
    states, micro_batch = asdict(one.states), one.largest_micro_batch
    teachers = sum(states.pop("teachers").values())
    beside = {"activations": one.activations, "logits": one.head, "signals": one.signals}
    held = {"teachers": teachers, **states, **beside}
    return {
        **{name: gib(size) for name, size in held.items()},
        "total": gib(one.total) + ("" if one.fits else "!"),
        "micro-batch": f"{micro_batch:,}" if micro_batch else "none fits",
        "step": duration(one.step.total),
    }


def plan_text(plan: Plan, every: bool = False) -> str:
    """What a plan says, memory in GiB per rank. `!` marks what does not fit.

    every: all ways of running each phase, not only the recipe's, which `*` marks then.
    """
    return "\n\n".join("\n".join(block) for block in _blocks(plan, every)) + "\n"


def _blocks(plan: Plan, every: bool) -> Iterator[Iterable[str]]:
    """Lines; an empty one stands between two blocks."""
    device = plan.device
    title = (
        f"{plan.recipe}: {plan.ranks} x {device.name}, {device.memory / GIB:.1f} GiB each, of "
        f"which {device.usable / GIB:.1f} are counted on; GiB per rank"
    )
    yield *advice(plan), title
    yield map(_model, plan.models)
    for job in plan.jobs:
        yield _job(job, every)
    if not every and any(len(job.others) > 1 for job in plan.jobs):
        yield ["Other stages, teachers live or cached, activation checkpointing: --all."]
    yield from map(_cache, plan.caches)
    for pays in plan.break_even:
        yield [_break_even(pays)]
    assumed = (
        f"Times are estimates: {OF_PRODUCTS:.0%} of {device.half_flops / 1e12:,.3g} TFLOP/s "
        f"(16 bit) in matrix products, {OF_MEMORY:.0%} of {device.bandwidth / 1e9:,.0f} GB/s "
        f"elsewhere, {device.launch * 1e6:.0f} us per kernel, nothing overlapping "
        f"({device.source}); {OF_LINKS:.0%} of {device.link / 1e9:,.4g} GB/s between GPUs of a "
        f"machine, and of {device.cards} x {device.network / 1e9:,.4g} GB/s between machines of "
        f"{device.per_machine}."
    )
    on_cpu = "this is a plan for this machine's CPU; --gpu h100, or another, is for a GPU"
    notes = [*plan.notes] if device.is_gpu else [on_cpu, *plan.notes]
    yield assumed, *(f"Note: {note}." for note in notes)


def _model(model: PlannedModel) -> str:
    parts = ", ".join(f"{part} {count / 1e6:.1f}" for part, count in model.parts().items())
    return f"  {model.name:<12} {model.parameters / 1e6:7.1f} M parameters ({parts})"


def _cache(cache: CachePlan) -> Iterator[str]:
    yield f"Phase {cache.phase}: {cache.memory / GIB:.2f} GiB per rank{_warning(cache.fits)}"
    size = f"{cache.bytes_per_example:,.0f} bytes per example"
    speed = f"{rate(cache.examples_per_second)} examples/s"
    if cache.bytes is not None and cache.build_seconds is not None:
        size += f", {amount(cache.bytes)} in all"
        speed += f", {duration(cache.build_seconds)}"
    yield f"  {size}; to build it: {speed}"


def _job(job: JobPlan, every: bool) -> Iterator[str]:
    steps = f" x {job.micro_steps}" if job.micro_steps > 1 else ""
    yield (
        f"Phase {job.phase}: {', '.join(job.models)}; micro-batch {job.micro_batch}{steps}, "
        f"{job.length} tokens{_warning(job.chosen.fits)}"
    )
    chosen, step = job.chosen, job.chosen.step
    own = "*" if every else " "
    rows = [
        [_name(one.choice, own if one.choice == chosen.choice else " "), *_cells(one).values()]
        for one in (job.others if every else [chosen])
    ]
    yield Table("", ["run as", *_cells(chosen)], rows).text()
    if job.steps is not None:
        times = f" x {len(job.models)}" if len(job.models) > 1 else ""
        yield f"  {job.steps:,} steps{times}: {duration(step.total * job.steps * len(job.models))}"
    parts = asdict(step).items()
    shares = ", ".join(f"{name} {part / step.total:.0%}" for name, part in parts if part)
    yield f"  a step: {shares}"
    if chosen.steps_ahead > 1:
        yield f"  Teachers read the texts of {chosen.steps_ahead} steps at once."
    if chosen.computing < MOSTLY_WAITS * step.total:
        works = "computes and sends" if step.communication else "computes"
        yield (
            f"  The GPU {works} for {duration(chosen.computing)} of {duration(step.total)}, "
            "and waits for Python in the rest: more examples in a micro-batch take little longer."
        )


def _name(choice: Choice, mark: str) -> str:
    teachers = f"{choice.teachers} " if choice.teachers else ""
    return f"{mark} {teachers}stage {choice.stage}{', checkpointing' * choice.checkpointing}"


def _break_even(one: BreakEven) -> str:
    faster = f"A step with live teachers takes {one.live_of_cached:.1f} times as long"
    if one.passes is None:
        return f"Cache for {one.phase}: does not pay. {faster}."
    verdict = "pays" if one.pays(one.live - one.cached) else "does not pay"
    return (
        f"Cache for {one.phase}: {verdict}. {faster} as from a cache; building it "
        f"costs {one.passes:.1f} passes over the split, and the recipe makes {one.in_recipe}."
    )


def _warning(fits: bool) -> str:
    return "" if fits else "  DOES NOT FIT"


# ------------------------------------------------------------------------------------- advice


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
        CACHED: _best(job, "cached", (0, 1, 2, 3)),
    }
    fitting = {way: one for way, one in ways.items() if one is not None and one.fits}
    if not fitting:
        return (
            f"{job.phase}: nothing fits. Take larger GPUs or more of them, smaller micro-batches, "
            f"or smaller models. {_each(ways)}."
        )
    cached, why = fitting.pop(CACHED, None), ""
    taken = min(fitting, key=lambda way: fitting[way].step.total, default=CACHED)
    if cached is not None and fitting:
        if pays and pays.pays(fitting[taken].step.total - cached.step.total):
            taken = CACHED
        else:
            why = ", because a cache does not pay"
    one = ways[taken]
    assert one is not None
    return f"{job.phase}: take {taken}, at stage {one.choice.stage}{why}. {_each(ways)}."


def _best(job: JobPlan, teachers: str, stages: tuple[int, ...]) -> Placement | None:
    """The fastest that fits, or the smallest where none does; with activation checkpointing as the
    recipe has it."""
    checkpointing = job.chosen.choice.checkpointing
    wanted = [Choice(stage, teachers, checkpointing) for stage in stages]
    found = [one for one in job.others if one.choice in wanted]
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
