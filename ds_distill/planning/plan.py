"""What a plan says of a recipe: memory per rank, time and cache of each of its phases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ds_distill.planning.facts import SplitFacts
from ds_distill.planning.gpus import Device
from ds_distill.planning.memory import States
from ds_distill.planning.models import PlannedModel
from ds_distill.planning.times import StepTime


@dataclass(frozen=True)
class Choice:
    """A way to run a training phase: ZeRO stage, teachers, activation checkpointing."""

    stage: int
    teachers: str | None
    """`live` or `cached`; None without teachers that are models."""
    checkpointing: bool


@dataclass(frozen=True)
class Placement:
    """What a choice takes on each rank."""

    choice: Choice
    states: States
    activations: int
    head: int
    """Bytes of logits and of their derivatives, of a masked-LM's loss."""
    signals: int
    """Bytes of what live teachers said of what they read at once, where that is held; of cached
    ones what is decoded of one micro-batch, and states."""
    largest_micro_batch: int
    """Examples that fit; 0 where not even one does."""
    step: StepTime
    """Of an optimizer step of the recipe's batch."""
    computing: float
    """Seconds of it in which the device computes and sends; in the others it waits for Python."""
    usable: int
    steps_ahead: int = 1
    """Steps whose texts live teachers read at once."""

    @property
    def total(self) -> int:
        return self.states.total + self.activations + self.head + self.signals

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


@dataclass(frozen=True)
class JobPlan:
    """A model that a phase trains."""

    phase: str
    models: list[str]
    """Their names: one, or several students that differ in what they learn from alone."""
    micro_batch: int
    micro_steps: int
    length: int
    split: SplitFacts
    steps: int | None
    """Optimizer steps; None where the number of examples is not known."""
    chosen: Placement
    """As the recipe has it."""
    others: list[Placement]
    """All choices, the recipe's among them."""

    def placement(self, teachers: str, like: Choice) -> Placement | None:
        """The same choice with live or with cached teachers."""
        wanted = replace(like, teachers=teachers)
        return next((other for other in self.others if other.choice == wanted), None)


@dataclass(frozen=True)
class CachePlan:
    """What a cache phase takes."""

    phase: str
    bytes_per_example: float
    """Of all teachers together."""
    examples: int | None
    bytes: int | None
    """None where the number of examples is not known."""
    examples_per_second: float
    """Of all ranks together, all teachers."""
    build_seconds: float | None
    memory: int
    """Bytes on each rank, of the teacher that takes most."""
    fits: bool


@dataclass(frozen=True)
class BreakEven:
    """Whether a cache pays for a phase: the teachers run once for it, live in each pass."""

    phase: str
    building: float
    """Seconds that it takes to build the cache of a step's examples."""
    live: float
    cached: float
    """Seconds of a step, as the recipe has it, with live and with cached teachers."""
    in_recipe: int
    """Passes over the split that the recipe makes: epochs, times students."""

    @property
    def live_of_cached(self) -> float:
        return self.live / self.cached

    @property
    def passes(self) -> float | None:
        """Over the split, after which building the cache has cost less time than it saves; None
        where never."""
        saved = self.live - self.cached
        return self.building / saved if saved > 0 else None

    def pays(self, saved: float) -> bool:
        """Whether building the cache costs less time than the recipe saves, so many seconds in a
        step."""
        return self.in_recipe * saved > self.building


@dataclass(frozen=True)
class Plan:
    """Everything that `ds-distill plan` shows."""

    recipe: str
    device: Device
    ranks: int
    models: list[PlannedModel] = field(default_factory=list)
    jobs: list[JobPlan] = field(default_factory=list)
    caches: list[CachePlan] = field(default_factory=list)
    break_even: list[BreakEven] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """JSON values; bytes, seconds and elements."""

        def placed(one: Placement) -> dict[str, Any]:
            more = {"total": one.total, "fits": one.fits, "step_seconds": one.step.total}
            return {**asdict(one), **more}

        shown = "phase", "live_of_cached", "passes", "in_recipe"
        return {
            **asdict(replace(self, models=[], jobs=[], break_even=[])),
            "models": {
                model.name: {
                    "model": model.reference,
                    "shipped_configuration": model.shipped,
                    "parameters": model.parameters,
                    "parts": model.parts(),
                }
                for model in self.models
            },
            "jobs": [
                asdict(replace(job, others=[]))
                | {"chosen": placed(job.chosen), "others": [*map(placed, job.others)]}
                for job in self.jobs
            ],
            "break_even": [{key: getattr(one, key) for key in shown} for one in self.break_even],
        }
