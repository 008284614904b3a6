"""The evaluate phase."""

from __future__ import annotations

from typing import Literal

from ds_distill.parts.entry import PhaseEntry
from ds_distill.parts.phases.base import PhaseSettings
from ds_distill.parts.section import Count, Name


class Evaluate(PhaseSettings):
    """All metrics of every model on a split: of classifiers also per class, of masked-LMs on masked
    tokens, the same ones for all."""

    kind: Literal["evaluate"] = "evaluate"
    split: Name = "test"
    """The split on which the models are evaluated."""
    batch_size: Count = 64
    """Examples per rank and forward pass."""

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, True)]

    @property
    def runs_teachers(self) -> bool:
        return True


ENTRY = PhaseEntry(
    name="evaluate",
    settings=Evaluate,
    implementation="ds_distill.phases.evaluate:evaluate",
    makes="evaluation",
)
