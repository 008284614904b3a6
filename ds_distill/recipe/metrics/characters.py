"""Metrics of spans of characters that are found in contexts.

Shapes: N questions.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import numpy as np

from ds_distill.recipe.metrics.metric import Together, precision, recall


class Spans(Sized, Protocol):
    """Predictions of any number of spans of a context."""

    @property
    def character_counts(self) -> np.ndarray:
        """How many characters of each context are right, predicted, there: float64 [N, 3]."""

    @property
    def span_counts(self) -> np.ndarray:
        """How many spans of each context are right, predicted, there: float64 [N, 3]."""


class OfCharacters(Together[Spans]):
    """Of the characters of all contexts together."""

    over = reported = ("characters",)

    def counts(self, predictions: Spans) -> np.ndarray:
        return predictions.character_counts


class CharacterF1(OfCharacters):
    """F1 of the characters of all contexts together: right are those that are both in a right
    answer and in a predicted span (micro)."""

    name, title, hub_name = "character_f1", "character F1", "f1"


class CharacterPrecision(OfCharacters):
    """Share of the characters in predicted spans that are in a right answer."""

    name, title, hub_name = "character_precision", "character precision", "precision"
    of = staticmethod(precision)


class CharacterRecall(OfCharacters):
    """Share of the characters in right answers that are in a predicted span."""

    name, title, hub_name = "character_recall", "character recall", "recall"
    of = staticmethod(recall)


class SpanF1(Together[Spans]):
    """F1 of the spans of all contexts together: right are those whose first and last character
    are."""

    name, title, hub_name = "span_f1", "span F1", "f1"
    over = reported = ("characters",)

    def counts(self, predictions: Spans) -> np.ndarray:
        return predictions.span_counts
