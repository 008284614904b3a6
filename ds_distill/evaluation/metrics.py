"""The metrics: what stands behind the entries of `ds_distill.recipe.metrics`.

Shapes: N examples, C classes or labels, R sets of weights, K sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_distill.evaluation.metric import CountMetric, MeanMetric, Metric, ratio
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    TokenScores,
)

Indicated = ClassPredictions | LabelPredictions

# ------------------------------------------------------------------------- share of right ones


class Accuracy(MeanMetric[ClassPredictions]):
    """Share of the examples whose largest logit is the label's."""

    def counts(self, predictions: ClassPredictions) -> np.ndarray:
        return _with_ones(predictions.predicted == predictions.labels)


class TokenAccuracy(MeanMetric[TokenScores]):
    """Share of the masked tokens that have the largest logit."""

    def counts(self, predictions: TokenScores) -> np.ndarray:
        return _stacked(predictions.right, predictions.tokens)


class TokenLoss(MeanMetric[TokenScores]):
    """Mean cross-entropy of the masked tokens, in nats."""

    def counts(self, predictions: TokenScores) -> np.ndarray:
        return _stacked(predictions.loss, predictions.tokens)


class TokenPerplexity(CountMetric[TokenScores]):
    """The exponential of the mean cross-entropy."""

    def counts(self, predictions: TokenScores) -> np.ndarray:
        return _stacked(predictions.loss, predictions.tokens)

    def score(self, sums: np.ndarray) -> np.ndarray:
        return np.exp(ratio(sums[..., 0], sums[..., 1], np.nan))


class WordLoss(MeanMetric[TokenScores]):
    """Mean over hidden words of -log p(word | the text without the hidden words), in nats; of the
    same words for models with other WordPiece vocabularies, each reading its own pieces.

    p(word) is the product over its pieces, each predicted while it, those after it, and the other
    hidden words are masked (PLL-word-l2r of Kauf and Ivanova 2023, of a share of the words at
    once). Of another hidden word that is longer the pieces before are shown. How many pieces a word
    has is given: of one that is cut into more, a little more is told.
    """

    def lacks(self, predictions: TokenScores) -> bool:
        return predictions.words is None

    def counts(self, predictions: TokenScores) -> np.ndarray:
        assert predictions.word_loss is not None and predictions.words is not None
        return _stacked(predictions.word_loss, predictions.words)


# ------------------------------------------------- F1, precision, recall: 0 where not defined


def f1(right: np.ndarray, predicted: np.ndarray, there: np.ndarray) -> np.ndarray:
    return ratio(2 * right, predicted + there)


def precision(right: np.ndarray, predicted: np.ndarray, there: np.ndarray) -> np.ndarray:
    return ratio(right, predicted)


def recall(right: np.ndarray, predicted: np.ndarray, there: np.ndarray) -> np.ndarray:
    return ratio(right, there)


class _Micro(CountMetric[Indicated]):
    """Of some classes together. The sums: how many right, predicted, there."""

    of = staticmethod(f1)

    def classes(self) -> list[int]:
        """Numbers of the classes that count."""
        left_out = getattr(self.settings, "leave_out", ())
        return [number for number, label in enumerate(self.labels) if label not in left_out]

    def counts(self, predictions: Indicated) -> np.ndarray:
        predicted, there = (part[:, self.classes()] for part in predictions.indicators())
        return _stacked(*(part.sum(axis=1) for part in (predicted & there, predicted, there)))

    def score(self, sums: np.ndarray) -> np.ndarray:
        return self.of(*np.moveaxis(sums, -1, 0))


class MicroF1(_Micro):
    """Over the classes that are not left out."""


class MicroPrecision(_Micro):
    """Over the classes that are not left out."""

    of = staticmethod(precision)


class MicroRecall(_Micro):
    """Over the classes that are not left out."""

    of = staticmethod(recall)


class F1(_Micro):
    """Of one class."""

    def classes(self) -> list[int]:
        return [_positive(self.settings, self.labels)]


class Precision(F1):
    """Of one class."""

    of = staticmethod(precision)


class Recall(F1):
    """Of one class."""

    of = staticmethod(recall)


class MacroF1(CountMetric[Indicated]):
    """Mean over the classes that are there or predicted; NaN without any. The sums: of each class,
    how many right, predicted, there."""

    of = staticmethod(f1)

    def counts(self, predictions: Indicated) -> np.ndarray:
        predicted, there = predictions.indicators()
        return np.hstack([predicted & there, predicted, there]).astype(np.float64)

    def score(self, sums: np.ndarray) -> np.ndarray:
        right, predicted, there = np.split(sums, 3, axis=-1)
        values = self.of(right, predicted, there)
        return ratio(values.sum(axis=-1), (predicted + there > 0).sum(axis=-1), np.nan)


class MacroPrecision(MacroF1):
    """Mean over the classes that are there or predicted."""

    of = staticmethod(precision)


class MacroRecall(MacroF1):
    """Mean over the classes that are there or predicted."""

    of = staticmethod(recall)


# --------------------------------------------------------------------------------- of scores


class AUC(Metric[ClassPredictions]):
    """Of one class: area under the ROC curve; a tie counts half."""

    def weighted(self, predictions: ClassPredictions, weights: np.ndarray) -> np.ndarray:
        return auc(*predictions.scores_of(_positive(self.settings, self.labels)), weights)


class MacroAUC(Metric[LabelPredictions]):
    """Mean of the labels' AUC, without those for which it is not defined."""

    def weighted(self, predictions: LabelPredictions, weights: np.ndarray) -> np.ndarray:
        values = []
        for logits, labels in zip(predictions.logits.T, predictions.labels.T, strict=True):
            known = labels >= 0
            values.append(auc(logits[known], labels[known] == 1, weights[:, known]))
        stacked = np.stack(values)
        defined = ~np.isnan(stacked)
        return ratio(np.where(defined, stacked, 0.0).sum(axis=0), defined.sum(axis=0), np.nan)


def auc(scores: np.ndarray, positive: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """scores: float [N]; positive: bool [N]; weights: float64 [R, N] -> float64 [R]."""
    order = np.argsort(scores, kind="stable")
    _, starts = np.unique(scores[order], return_index=True)
    if not len(starts):
        return np.full(len(weights), np.nan)
    weights = weights[:, order]
    # Of each score that differs, the weight of the examples that have it: [R, scores].
    above = np.add.reduceat(weights * positive[order], starts, axis=1)
    below = np.add.reduceat(weights * ~positive[order], starts, axis=1)
    smaller = np.cumsum(below, axis=1) - below
    pairs = above.sum(axis=1) * below.sum(axis=1)
    return ratio((above * (smaller + below / 2)).sum(axis=1), pairs, np.nan)


class ECE(CountMetric[ClassPredictions]):
    """Sum over bins of |right - confidence|, each summed over the bin's examples, divided by N. The
    sums: of each bin that difference; the examples."""

    def counts(self, predictions: ClassPredictions) -> np.ndarray:
        bins = getattr(self.settings, "bins", 15)
        excess = (predictions.predicted == predictions.labels) - predictions.confidence
        counts = np.zeros((len(predictions), bins + 1))
        counts[np.arange(len(predictions)), bin_of(predictions.confidence, bins)] = excess
        counts[:, bins] = 1.0
        return counts

    def score(self, sums: np.ndarray) -> np.ndarray:
        return ratio(np.abs(sums[..., :-1]).sum(axis=-1), sums[..., -1], np.nan)


# -------------------------------------------------------------------------------- of numbers


class MSE(MeanMetric[NumberPredictions]):
    """Mean squared error."""

    def counts(self, predictions: NumberPredictions) -> np.ndarray:
        return _with_ones((predictions.predicted - predictions.labels) ** 2)


class Pearson(Metric[NumberPredictions]):
    """Pearson's correlation of predictions and labels."""

    def weighted(self, predictions: NumberPredictions, weights: np.ndarray) -> np.ndarray:
        predicted, labels = predictions.predicted, predictions.labels
        return correlation(predicted[None], labels[None], weights)

    def excludes(self, predictions: NumberPredictions) -> bool:
        """The same number for all examples."""
        return len(np.unique(predictions.predicted)) < 2 <= len(np.unique(predictions.labels))


class Spearman(Pearson):
    """Pearson's correlation of the ranks."""

    def weighted(self, predictions: NumberPredictions, weights: np.ndarray) -> np.ndarray:
        predicted, labels = predictions.predicted, predictions.labels
        return correlation(ranks(predicted, weights), ranks(labels, weights), weights)


def correlation(one: np.ndarray, other: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Pearson's correlation; NaN where either is constant over the examples that count.

    one, other: float64 [R, N], or [1, N] for all. weights: float64 [R, N] -> float64 [R].
    """
    total = weights.sum(axis=1)

    def centred(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[R, N], and whether they are constant: bool [R]. The mean of equal numbers can be off by
        rounding, so that a sum of squares does not tell."""
        mean = ratio((weights * values).sum(axis=1), total)
        counted = weights > 0
        low = np.where(counted, values, np.inf).min(axis=1, initial=np.inf)
        high = np.where(counted, values, -np.inf).max(axis=1, initial=-np.inf)
        return values - mean[:, None], low >= high

    (one, constant), (other, constant_too) = centred(one), centred(other)
    squares = (weights * one**2).sum(axis=1), (weights * other**2).sum(axis=1)
    found = ratio((weights * one * other).sum(axis=1), np.sqrt(squares[0]) * np.sqrt(squares[1]))
    return np.where(constant | constant_too, np.nan, np.clip(found, -1.0, 1.0))


def ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The rank of each example among those that count, each as often as its weight says, to a
    number that is the same for all; equal numbers share the mean of their ranks.

    values: float [N]. weights: float64 [R, N] -> float64 [R, N].
    """
    order = np.argsort(values, kind="stable")
    _, starts, group = np.unique(values[order], return_index=True, return_inverse=True)
    if not len(starts):
        return weights
    each = np.add.reduceat(weights[:, order], starts, axis=1)  # of each number that differs
    middle = np.cumsum(each, axis=1) - each / 2
    found = np.empty_like(weights)
    found[:, order] = middle[:, group]
    return found


def bin_of(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Of equal bins of (0, 1], each without its lower bound, the number from 0: int64 [N]."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def _positive(settings: Any, labels: Sequence[str]) -> int:
    return labels.index(settings.positive) if settings.positive is not None else len(labels) - 1


def _stacked(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, axis=1).astype(np.float64)


def _with_ones(values: np.ndarray) -> np.ndarray:
    return _stacked(values, np.ones(len(values)))
