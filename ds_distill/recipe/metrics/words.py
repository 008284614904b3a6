"""Metrics of tags: of the words of lists, and of the entities that they make.

Shapes: N examples, T entity types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Literal, Protocol

import numpy as np

from ds_distill.errors import Mistake
from ds_distill.recipe.metrics.metric import (
    MeanOfClasses,
    MetricSettings,
    Together,
    precision,
    recall,
)
from ds_distill.recipe.tags import are_entities


class Tagged(Sized, Protocol):
    """Predictions of a tag for each word."""

    def word_counts(self) -> np.ndarray:
        """How many words of each type are right, predicted, there: float64 [N, 3, T]."""

    def entity_counts(self, *, strict: bool) -> np.ndarray:
        """How many entities of each type are right, predicted, there: float64 [N, 3, T]."""


class OfEntities(Together[Tagged]):
    """Of the entities of all types together."""

    over = ("words",)

    class Settings(MetricSettings):
        mode: Literal["default", "strict"] = "default"
        """How tags make entities, as seqeval has it: `default` lets an I- tag without a B- before
        it begin an entity, as conlleval does; `strict` does not."""

    def counts(self, predictions: Tagged) -> np.ndarray:
        return predictions.entity_counts(strict=self.settings.mode == "strict").sum(axis=2)

    def label_mistakes(self) -> Iterator[Mistake]:
        if not are_entities(self.labels):
            yield Mistake(
                "",
                f"{self.name} is of entities, whose tags are O, B-TYPE and I-TYPE (IOB2), and the "
                f"task has {', '.join(self.labels)}. Choose accuracy or word_f1, or correct the "
                "tags.",
            )


class EntityF1(OfEntities):
    """F1 of the entities of all types together: right are those whose type and both ends are."""

    name, title, hub_name = "entity_f1", "entity F1", "f1"
    reported = ("words",)


class EntityPrecision(OfEntities):
    """Share of the predicted entities that are right."""

    name, title, hub_name = "entity_precision", "entity precision", "precision"
    of = staticmethod(precision)


class EntityRecall(OfEntities):
    """Share of the entities that are predicted."""

    name, title, hub_name = "entity_recall", "entity recall", "recall"
    of = staticmethod(recall)


class WordF1(MeanOfClasses[Tagged]):
    """Mean over the entity types of the F1 of their words, B- and I- alike (how BLURB scores EBM
    PICO); over the tags but O, where they are none of entities. A type that is neither there nor
    predicted is not part of it."""

    name, title, hub_name = "word_f1", "word F1", "f1"
    over = ("words",)

    def counts(self, predictions: Tagged) -> np.ndarray:
        return predictions.word_counts().reshape(len(predictions), -1)
