"""The evaluate phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import PhaseEntry
from ds_distill.recipe.phases.base import PhaseSettings
from ds_distill.recipe.section import Count, Name

START = "start"
"""Name and role of the student before any training."""


class Evaluate(PhaseSettings):
    """All metrics of every model on a split: of classifiers also per class, of masked-LMs on masked
    tokens, the same ones for all."""

    kind: Literal["evaluate"] = "evaluate"
    split: Name = "test"
    """The split on which the models are evaluated."""
    start: bool = False
    """Evaluate the student before any training as well, under the name `start`: of each student it
    then tells which part of the way from there to a teacher it has gone (`gap_closed`)."""
    batch_size: Count = 64
    """Examples per rank and forward pass."""

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, True)]

    @property
    def runs_teachers(self) -> bool:
        return True


def mistakes(settings: Evaluate, context: Context) -> Iterator[str]:
    """A model that has the name of the student before training."""
    if settings.start and START in context.models:
        yield (
            f"{context.location}.start: a model is called {START!r}, which is the name of the "
            "student before any training here. Rename that model."
        )


ENTRY = PhaseEntry(
    name="evaluate",
    settings=Evaluate,
    implementation="ds_distill.phases.evaluate:evaluate",
    mistakes=mistakes,
    makes="evaluation",
)
