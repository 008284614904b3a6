"""What models predict of a split's examples, as metrics read it: one type for each `Over`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import expit, logsumexp, softmax

from ds_distill.errors import UserError
from ds_distill.recipe.metrics.classes import bin_of

DENSE_CLASSES = 100
"""With more classes a report has the confusion matrix's counts that are not 0 alone."""

RELIABILITY_BINS = 15
"""Of the figure of reliability: as many as the calibration error has by default."""


@dataclass(frozen=True)
class Predictions:
    """Of N examples, one model's."""

    judged_by: ClassVar[tuple[str, ...]] = ("labels",)
    """Of `arrays`: what is known of the examples, the same for all models."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Its fields, as a run keeps them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        """N."""
        raise NotImplementedError

    def numbers(self) -> dict[str, int]:
        """How many examples there are, and what else is counted."""
        return {"examples": len(self)}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        """What a report has beside metrics, by class and by confidence.

        names: of the task's classes.
        """
        return {}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        """What `arrays` gave; labels: names of the task's classes."""
        return cls(**arrays)

    def same_examples(self, other: Predictions) -> bool:
        """Whether another model was judged by the same."""
        mine, theirs = self.arrays(), other.arrays()
        return all(np.array_equal(mine[name], theirs[name]) for name in self.judged_by)


@dataclass(frozen=True)
class ClassPredictions(Predictions):
    """Of N labelled examples with one of C classes each."""

    logits: np.ndarray
    """float [N, C]."""
    labels: np.ndarray
    """int64 [N], 0 or more."""

    @staticmethod
    def labelled(logits: np.ndarray, labels: np.ndarray) -> ClassPredictions:
        """Of the labelled ones among all examples; labels: int [N], -1 unlabelled."""
        known = labels >= 0
        return ClassPredictions(logits[known], labels[known])

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def predicted(self) -> np.ndarray:
        """int64 [N]: the class with the largest logit, of equals the first."""
        return self.logits.argmax(axis=1)

    @cached_property
    def confidence(self) -> np.ndarray:
        """float64 [N]: the probability of that class."""
        return softmax(self.logits.astype(np.float64), axis=1).max(axis=1)

    def right_counts(self) -> np.ndarray:
        """Whether each example is right, and 1: float64 [N, 2]."""
        right = self.predicted == self.labels
        return np.stack([right, np.ones_like(right)], axis=1).astype(np.float64)

    def per_class(self, names: Sequence[str]) -> dict[str, float | None]:
        """The accuracy on the examples of each class (its recall); None without any."""
        right = self.predicted == self.labels
        totals = np.bincount(self.labels, minlength=len(names))
        rights = np.bincount(self.labels[right], minlength=len(names))
        return {
            name: float(rights[index] / totals[index]) if totals[index] else None
            for index, name in enumerate(names)
        }

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            "per_class": self.per_class(names),
            "confusion": confusion_counts(self, len(names)),
            "reliability": reliability(self.confidence, self.predicted == self.labels),
        }

    def indicators(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [N, C] each: which class is predicted, and which is the label."""
        classes = np.arange(self.logits.shape[1])
        return self.predicted[:, None] == classes, self.labels[:, None] == classes

    def scores_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 [N] that rises with the probability of a class (its log odds), and bool [N]:
        where it is the label."""
        logits = self.logits.astype(np.float64)
        others = logsumexp(np.delete(logits, index, axis=1), axis=1)
        return logits[:, index] - others, self.labels == index


@dataclass(frozen=True)
class LabelPredictions(Predictions):
    """Of N examples with any number of L labels each. A label is predicted where its logit is above
    0."""

    logits: np.ndarray
    """float [N, L]."""
    labels: np.ndarray
    """int64 [N, L] of 0 and 1; -1 where it is not known: that label of that example is left out."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def predicted(self) -> np.ndarray:
        """int64 [N, L]: 1 where a label is predicted."""
        return (self.logits > 0).astype(np.int64)

    def per_class(self, names: Sequence[str]) -> dict[str, float | None]:
        """The F1 of each label; None of one that no example has."""
        return {
            name: 2 * right / (predicted + there) if there else None
            for name, (right, predicted, there) in self.class_counts(names).items()
        }

    def class_counts(self, names: Sequence[str]) -> dict[str, list[int]]:
        """By label how many examples have it and are predicted to, are predicted to, have it."""
        predicted, there = self.indicators()
        counts = np.stack([part.sum(axis=0) for part in (predicted & there, predicted, there)])
        return dict(zip(names, counts.T.tolist(), strict=True))

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        """Confidence is the probability of each label of each example, which is right where the
        label is there."""
        known = self.labels >= 0
        probabilities = expit(self.logits[known].astype(np.float64))
        return {
            "per_class": self.per_class(names),
            "class_counts": self.class_counts(names),
            "reliability": reliability(probabilities, self.labels[known] == 1),
        }

    def indicators(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [N, L] each: which labels are predicted, and which are there."""
        return (self.logits > 0) & (self.labels >= 0), self.labels == 1


@dataclass(frozen=True)
class TokenScores(Predictions):
    """How a masked-LM does on each of N examples. All float64 [N]."""

    judged_by = ("tokens",)

    loss: np.ndarray
    """Sum of the cross-entropies of its masked tokens, of those that all models know."""
    right: np.ndarray
    """How many of them have the largest logit."""
    tokens: np.ndarray
    """How many they are."""
    own: np.ndarray | None = None
    """Of a model that knows more tokens, float64 [3, N]: these three of all that it knows."""
    word_loss: np.ndarray | None = None
    """Sum of the cross-entropies of the hidden words; see `WordLoss`. None where they were not
    asked."""
    words: np.ndarray | None = None
    """How many words are hidden, the same ones for all models."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in super().arrays().items() if array is not None}

    def __len__(self) -> int:
        return len(self.tokens)

    def numbers(self) -> dict[str, int]:
        """Raises UserError where no token is masked."""
        tokens = int(self.tokens.sum())
        if tokens == 0:
            raise UserError(
                "a split has no token that is masked, so there is nothing to measure: its texts "
                "are too few or too short for task.masking.rate. Add texts to it, or raise the "
                "rate."
            )
        return {"examples": len(self), "tokens": tokens}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        return {} if self.words is None else {"hidden_words": int(self.words.sum())}

    def right_counts(self) -> np.ndarray:
        """How many masked tokens are right, and how many there are: float64 [N, 2]."""
        return np.stack([self.right, self.tokens], axis=1).astype(np.float64)

    @property
    def of_own(self) -> TokenScores | None:
        """On all tokens that it knows; None where all models know them."""
        return None if self.own is None else TokenScores(*self.own)


@dataclass(frozen=True)
class NumberPredictions(Predictions):
    """Of N examples whose label is a number."""

    predicted: np.ndarray
    """float64 [N]."""
    labels: np.ndarray
    """float64 [N], finite."""

    def __len__(self) -> int:
        return len(self.labels)


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Numbers of examples, true classes by predicted: int64 [C, C].

    labels, predicted: class ids, int [N].
    """
    found = np.bincount(labels * classes + predicted, minlength=classes**2)
    return found.reshape(classes, classes)


def confusion_counts(
    predictions: ClassPredictions, classes: int
) -> list[list[int]] | dict[str, list[int]]:
    """The confusion matrix as JSON: rows of counts, true classes by predicted. With more than
    DENSE_CLASSES classes nearly all are 0, and it is the others alone: `true`, `predicted` (class
    ids) and `count`, one element for each."""
    labels, predicted = predictions.labels, predictions.predicted
    if classes <= DENSE_CLASSES:
        dense: list[list[int]] = confusion_matrix(labels, predicted, classes).tolist()
        return dense
    cells, counts = np.unique(labels * classes + predicted, return_counts=True)
    rows, columns = np.divmod(cells, classes)
    return {"true": rows.tolist(), "predicted": columns.tolist(), "count": counts.tolist()}


def reliability(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Of each bin of confidence that holds a prediction: the mean confidence, the accuracy, and how
    many predictions it holds.

    confidence: float64 [N], probabilities. right: bool [N].
    """
    bins = bin_of(confidence, RELIABILITY_BINS)
    return [
        {
            "confidence": float(confidence[here].mean()),
            "accuracy": float(right[here].mean()),
            "count": int(here.sum()),
        }
        for here in (bins == number for number in np.unique(bins))
    ]
