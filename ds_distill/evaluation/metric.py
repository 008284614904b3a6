"""What a metric is: a number of predictions that is known for any weights of the examples, so that
one bootstrap serves them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from typing import Any, Generic, TypeVar

import numpy as np

from ds_distill.recipe.metric_settings import MetricSettings

P = TypeVar("P", bound=Sized)
"""The predictions that a metric reads: `ClassPredictions`, `LabelPredictions`, `TagPredictions`,
`TokenScores` or `NumberPredictions`."""


class Metric(ABC, Generic[P]):
    """A number of predictions. N examples, R sets of weights."""

    def __init__(self, settings: Any, labels: Sequence[str]) -> None:
        """
        settings: the metric's section of the recipe, a `MetricSettings`.
        labels: the task's, in the order of the class ids; none over masked tokens or numbers.
        """
        self.settings: MetricSettings = settings
        self.labels = list(labels)

    @abstractmethod
    def weighted(self, predictions: P, weights: np.ndarray) -> np.ndarray:
        """weights: float64 [R, N], 0 or more -> float64 [R]. NaN where it is not defined, as an AUC
        without an example of one of the classes."""

    def value(self, predictions: P) -> float:
        """With each example once."""
        return float(self.weighted(predictions, np.ones((1, len(predictions))))[0])

    def lacks(self, predictions: P) -> bool:
        """Whether what it reads was not asked of the model."""
        return False

    def excludes(self, predictions: P) -> bool:
        """Whether a model could predict what it is not defined for, on any examples, and has."""
        return False


class CountMetric(Metric[P]):
    """A function of sums over the examples: nearly all metrics are."""

    @abstractmethod
    def counts(self, predictions: P) -> np.ndarray:
        """float64 [N, K]: what each example adds to each of the sums."""

    @abstractmethod
    def score(self, sums: np.ndarray) -> np.ndarray:
        """float64 [..., K] -> [...]. NaN where it is not defined."""

    def weighted(self, predictions: P, weights: np.ndarray) -> np.ndarray:
        return self.score(weights @ self.counts(predictions))

    def value(self, predictions: P) -> float:
        return float(self.score(self.counts(predictions).sum(axis=0)))

    def pair_counts(self, first: P, second: P) -> np.ndarray:
        """float64 [N, M]: what each example adds to the sums that `difference` reads."""
        return np.hstack([self.counts(first), self.counts(second)])

    def difference(self, sums: np.ndarray) -> np.ndarray:
        """float64 [..., M] -> [...]: the score of the first predictions less that of the second."""
        first, second = np.split(sums, 2, axis=-1)
        return self.score(first) - self.score(second)


class MeanMetric(CountMetric[P]):
    """A sum, divided by a number that is the same for all models."""

    @abstractmethod
    def counts(self, predictions: P) -> np.ndarray:
        """float64 [N, 2]: the sum, and the number."""

    def score(self, sums: np.ndarray) -> np.ndarray:
        return ratio(sums[..., 0], sums[..., 1], np.nan)

    def pair_counts(self, first: P, second: P) -> np.ndarray:
        """The difference of the sums is enough: fewer kinds of examples to draw from."""
        counts = self.counts(first)
        return np.stack([counts[:, 0] - self.counts(second)[:, 0], counts[:, 1]], axis=1)

    def difference(self, sums: np.ndarray) -> np.ndarray:
        return self.score(sums)


def ratio(above: np.ndarray, below: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """above / below; `otherwise` where below is 0."""
    filled = np.full(above.shape, otherwise)
    return np.divide(above, below, out=filled, where=below != 0)
