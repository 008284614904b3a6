"""What ds_distill knows of the parts before they run. Imports no torch: `check` reads this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ds_distill.evaluation import ClassPredictions
from ds_distill.parts import (
    Compared,
    Context,
    CountMetric,
    Mistake,
    Name,
    Needs,
    PhaseSettings,
    Routing,
    SoftenedTerm,
    ratio,
)


class ReverseKL(SoftenedTerm):
    """T^2 * KL(student || teacher): the student leaves out what it cannot model."""

    term, runs = "reverse_kl", "example_parts.parts:ReverseKLTerm"
    needs = Needs(teachers=1, distributions=True)
    reads_logits = "both"


class Confident(Routing):
    """The mean of the teachers' logits, each weighted by its largest probability to a power."""

    runs, needs = "example_parts.parts:confident", Needs(distributions=True)
    keeps_lone_teacher = True
    compared = (Compared("confident", "the mean, weighted by confidence"),)

    policy: Literal["confident"] = "confident"
    power: Annotated[float, Field(ge=0)] = 1.0


class WorstClass(CountMetric[ClassPredictions]):
    """The accuracy on the class on which it is lowest."""

    name, title = "worst_class", "worst class"
    over = reported = ("classes",)

    def counts(self, predictions: ClassPredictions) -> np.ndarray:
        """Of each class, how many examples are right, and how many there are."""
        predicted, there = predictions.indicators()
        return np.hstack([predicted & there, there]).astype(np.float64)

    def score(self, sums: np.ndarray) -> np.ndarray:
        right, there = np.split(sums, 2, axis=-1)
        return ratio(right, there, np.inf).min(axis=-1)


class Soup(PhaseSettings):
    """The mean of the weights of several models of one architecture."""

    runs, makes = "example_parts.parts:soup", "student"

    kind: Literal["soup"] = "soup"
    models: list[Name]
    save_as: Name = "soup"

    @property
    def starts(self) -> list[str]:
        return self.models

    @property
    def outputs(self) -> list[str]:
        return [self.save_as]

    def lists(self) -> dict[str, list[str]]:
        return {"models": self.models}

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        for model in self.models:
            if model not in context.models:
                known = ", ".join(sorted(context.models))
                what = f"no model {model!r} before this phase, only {known}."
                yield Mistake(f"{context.location}.models", what)
