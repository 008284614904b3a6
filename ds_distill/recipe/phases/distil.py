"""The distil phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import ConfiguredEntry, Needs, PhaseEntry
from ds_distill.recipe.phases.base import (
    FollowingPhase,
    TrainingPhase,
    follow_mistakes,
    training_mistakes,
)
from ds_distill.recipe.policies import POLICIES, Average, Routing
from ds_distill.recipe.section import Name, Section, Several
from ds_distill.recipe.terms import SoftenedTerm
from ds_distill.recipe.unions import OneOf

Policy = Annotated[
    Routing,
    OneOf("policy", "policy", lambda: {name: entry.settings for name, entry in POLICIES.items()}),
]


def _average() -> list[Routing]:
    return [Average()]


class Distil(TrainingPhase, FollowingPhase):
    """Train a student on teacher signals; with several routings, one student each."""

    kind: Literal["distil"] = "distil"
    start: Name = "student"
    """The model it starts from: `student` or the name of an earlier trained model."""
    teachers: Literal["live", "cached"] = "live"
    """Teachers in the engine, or their signals from an earlier cache phase."""
    routing: Several[Policy] = Field(default_factory=_average)
    """Which teacher an example follows: a policy's name, or its settings, or a list of them."""
    save_as: Name | None = None
    """Name of the student. Default: `student`, or with several routings the policy's."""

    @model_validator(mode="after")
    def _one_student_per_policy(self) -> Distil:
        if len(self.routing) > 1 and self.save_as is not None:
            raise ValueError("`save_as` names one student, and `routing` lists several")
        policies = [routing.policy for routing in self.routing]
        if len(set(policies)) < len(policies):
            raise ValueError("`routing` lists a policy twice; use two distil phases with `save_as`")
        if not policies:
            raise ValueError("`routing` needs a policy, e.g. average")
        return self

    @property
    def temperature(self) -> float:
        """Of the distributions that the terms compare: policies mix probabilities at it."""
        softened = (term for term in self.losses.values() if isinstance(term, SoftenedTerm))
        return next((term.temperature for term in softened), 1.0)

    @property
    def starts(self) -> list[str]:
        return [self.start]

    @property
    def outputs(self) -> list[str]:
        if len(self.routing) == 1:
            return [self.save_as or "student"]
        return [routing.policy for routing in self.routing]

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, any(entry.needs_of(of).labels for _, entry, of in self.parts()))]

    @property
    def cached_split(self) -> str | None:
        return self.split if self.teachers == "cached" else None

    def parts(self) -> Iterator[tuple[str, ConfiguredEntry, Section]]:
        yield from super().parts()
        for routing in self.routing:
            yield "routing", POLICIES[routing.policy], routing


def mistakes(settings: Distil, context: Context) -> Iterator[str]:
    """A start or a teacher that is not there, and what is wrong with any training."""
    yield from training_mistakes(settings, context)
    yield from follow_mistakes(settings, context)
    if settings.start not in context.models:
        yield (
            f"{context.location}.start: no model {settings.start!r} before this phase. There are: "
            f"{', '.join(sorted(context.models))}."
        )


ENTRY = PhaseEntry(
    name="distil",
    settings=Distil,
    implementation="ds_distill.phases.distil:distil",
    needs=Needs(teachers=1),
    mistakes=mistakes,
    makes="student",
)
