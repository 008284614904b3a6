"""Metrics of masked tokens, and of hidden words. Sums of each of N examples: float64 [N]."""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import numpy as np

from ds_distill.recipe.metrics.metric import CountMetric, MeanMetric, ratio, stacked


class Scored(Sized, Protocol):
    """How a masked-LM does on each example."""

    @property
    def loss(self) -> np.ndarray:
        """Sum of the cross-entropies of its masked tokens."""

    @property
    def tokens(self) -> np.ndarray:
        """How many they are."""

    @property
    def word_loss(self) -> np.ndarray | None:
        """Sum of the cross-entropies of the hidden words; None where they were not asked."""

    @property
    def words(self) -> np.ndarray | None:
        """How many words are hidden."""


class Loss(MeanMetric[Scored]):
    """Mean cross-entropy of the masked tokens, in nats."""

    name = title = "loss"
    over = reported = ("masked tokens",)
    shown = ".3f"
    higher_is_better = False

    def counts(self, predictions: Scored) -> np.ndarray:
        return stacked(predictions.loss, predictions.tokens)


class Perplexity(CountMetric[Scored]):
    """The exponential of the mean cross-entropy of the masked tokens."""

    name = title = hub_name = "perplexity"
    over = reported = ("masked tokens",)
    shown = ".2f"
    higher_is_better = False

    def counts(self, predictions: Scored) -> np.ndarray:
        return stacked(predictions.loss, predictions.tokens)

    def score(self, sums: np.ndarray) -> np.ndarray:
        return np.exp(ratio(sums[..., 0], sums[..., 1], np.nan))


class WordLoss(MeanMetric[Scored]):
    """Mean negative log-probability of hidden words, in nats, each predicted piece by piece from
    the left: comparable between WordPiece vocabularies. Takes a forward pass for each piece of the
    longest."""

    # The mean over hidden words of -log p(word | the text without the hidden words), of the same
    # words for models with other WordPiece vocabularies, each reading its own pieces. p(word) is
    # the product over its pieces, each predicted while it, those after it, and the other hidden
    # words are masked (PLL-word-l2r of Kauf and Ivanova 2023, of a share of the words at once). Of
    # another hidden word that is longer the pieces before are shown. How many pieces a word has is
    # given: of one that is cut into more, a little more is told.

    name, title = "word_loss", "nats a word"
    over = reported = ("masked tokens",)
    shown = ".3f"
    higher_is_better = False

    def lacks(self, predictions: Scored) -> bool:
        return predictions.words is None

    def counts(self, predictions: Scored) -> np.ndarray:
        assert predictions.word_loss is not None and predictions.words is not None
        return stacked(predictions.word_loss, predictions.words)
