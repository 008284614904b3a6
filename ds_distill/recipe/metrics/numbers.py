"""Metrics of numbers.

Shapes: N examples, R sets of weights.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

import numpy as np

from ds_distill.recipe.metrics.metric import MeanMetric, Metric, ratio, with_ones


class Numbers(Sized, Protocol):
    """Predictions of a number for each example."""

    @property
    def predicted(self) -> np.ndarray:
        """float64 [N]."""

    @property
    def labels(self) -> np.ndarray:
        """float64 [N]."""


class Pearson(Metric[Numbers]):
    """Pearson's correlation of predictions and labels. Where all predictions are the same number,
    it is not defined."""

    name, title, hub_name = "pearson", "Pearson", "pearsonr"
    over = reported = ("numbers",)
    shown = ".3f"

    def weighted(self, predictions: Numbers, weights: np.ndarray) -> np.ndarray:
        predicted, labels = predictions.predicted, predictions.labels
        return correlation(predicted[None], labels[None], weights)

    def no_value(self, counts: np.ndarray, examples: int) -> str | None:
        if len(counts) > 1:
            return None
        return f"a correlation needs labels that differ, and all of its {examples:,} are the same"

    def excludes(self, predictions: Numbers) -> bool:
        """The same number for all examples."""
        return len(np.unique(predictions.predicted)) < 2 <= len(np.unique(predictions.labels))


class Spearman(Pearson):
    """Spearman's correlation: Pearson's of the ranks, where equal numbers share the mean of
    theirs."""

    name, title, hub_name = "spearman", "Spearman", "spearmanr"

    def weighted(self, predictions: Numbers, weights: np.ndarray) -> np.ndarray:
        predicted, labels = predictions.predicted, predictions.labels
        return correlation(ranks(predicted, weights), ranks(labels, weights), weights)


class MSE(MeanMetric[Numbers]):
    """Mean squared error of the predictions."""

    name, title, hub_name = "mse", "MSE", "mse"
    over = reported = ("numbers",)
    shown = ".4g"
    higher_is_better = False

    def counts(self, predictions: Numbers) -> np.ndarray:
        return with_ones((predictions.predicted - predictions.labels) ** 2)


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
