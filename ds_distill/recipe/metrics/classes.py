"""Metrics of classes, one for each example or any number; accuracy, which is of words and tokens
too.

Shapes: N examples, C classes, R sets of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import ClassVar, Protocol

import numpy as np
from pydantic import Field

from ds_distill.errors import Mistake
from ds_distill.recipe.metrics.metric import (
    METRICS,
    CountMetric,
    MeanMetric,
    MeanOfClasses,
    Metric,
    MetricSettings,
    Over,
    P,
    Together,
    precision,
    ratio,
    recall,
    stacked,
)
from ds_distill.recipe.section import Count


class Judged(Sized, Protocol):
    """Predictions that are right or wrong."""

    def right_counts(self) -> np.ndarray:
        """float64 [N, 2]: how many are right in each example, and how many there are."""


class Indicated(Sized, Protocol):
    """Predictions of classes, one or several."""

    def indicators(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [N, C] each: which classes are predicted, and which are there."""


class OneClass(Indicated, Protocol):
    """Predictions of one class."""

    @property
    def predicted(self) -> np.ndarray:
        """int64 [N]."""

    @property
    def labels(self) -> np.ndarray:
        """int64 [N]."""

    @property
    def confidence(self) -> np.ndarray:
        """float64 [N]: the probability of the class that is predicted."""

    def scores_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 [N] that rises with the probability of a class, and bool [N]: where it is the
        label."""


class ManyLabels(Indicated, Protocol):
    """Predictions of any number of labels."""

    @property
    def logits(self) -> np.ndarray:
        """float [N, C]."""

    @property
    def labels(self) -> np.ndarray:
        """int64 [N, C] of 0 and 1; -1 where it is not known."""


class Accuracy(MeanMetric[Judged]):
    """Share of the examples, of the words, or of the masked tokens, that are predicted right."""

    name = title = hub_name = "accuracy"
    over = reported = ("classes", "words", "masked tokens")

    def counts(self, predictions: Judged) -> np.ndarray:
        return predictions.right_counts()


# --------------------------------------------------------------------------- of one class


class OfOneClass(Metric[P]):
    """A metric of one class of a task."""

    over = ("classes",)

    class Settings(MetricSettings):
        positive: str | None = None
        """The label that it is about. Default: of two labels, the last."""

    @property
    def positive(self) -> int:
        """The number of the class."""
        label = self.settings.positive
        return self.labels.index(label) if label is not None else len(self.labels) - 1

    def label_mistakes(self) -> Iterator[Mistake]:
        positive, labels = self.settings.positive, self.labels
        if positive is not None and positive not in labels:
            what = f"there is no label {positive!r}; the task has {_all(labels)}."
            yield Mistake("positive", what)
        if positive is None and len(labels) > 2:
            others = (
                metric.name
                for metric in METRICS["classes"].values()
                if not issubclass(metric, OfOneClass)
            )
            yield Mistake(
                "",
                f"{self.name} is of one class, and the task has {len(labels)}: {_all(labels)}. "
                f"Set metric: {{name: {self.name}, positive: LABEL}}, or choose {_all([*others])}.",
            )


class Single(OfOneClass[Indicated], Together[Indicated]):
    """Of what is predicted of one class."""

    def counts(self, predictions: Indicated) -> np.ndarray:
        return _counts_of(predictions, [self.positive])


class F1(Single):
    """Of one class: harmonic mean of precision and recall."""

    name, title, hub_name = "f1", "F1", "f1"


class Precision(Single):
    """Of one class: share of those predicted that are of it."""

    name = title = hub_name = "precision"
    of = staticmethod(precision)


class Recall(Single):
    """Of one class: share of its examples that are predicted."""

    name = title = hub_name = "recall"
    of = staticmethod(recall)


class AUC(OfOneClass[OneClass]):
    """Of one class: how often an example of it has a larger probability of it than an example of
    another class (area under the ROC curve)."""

    name, title, hub_name = "auc", "AUC", "roc_auc"

    def weighted(self, predictions: OneClass, weights: np.ndarray) -> np.ndarray:
        return auc(*predictions.scores_of(self.positive), weights)

    def no_value(self, counts: np.ndarray, examples: int) -> str | None:
        there = int(counts[self.positive])
        if 0 < there < examples:
            return None
        return (
            f"an AUC needs examples of {self.labels[self.positive]!r} and of other labels, and "
            f"{there:,} of its {examples:,} are of it"
        )


# ------------------------------------------------------------------------ of several together


class Micro(Together[Indicated]):
    """Of the predictions of all classes together, but of those that are left out."""

    over = ("classes", "labels")

    class Settings(MetricSettings):
        leave_out: list[str] = Field(default_factory=list)
        """Labels that do not count, such as the class of examples without a relation. To predict
        one of these is no prediction."""

    def counts(self, predictions: Indicated) -> np.ndarray:
        left_out = self.settings.leave_out
        kept = [number for number, label in enumerate(self.labels) if label not in left_out]
        return _counts_of(predictions, kept)

    def label_mistakes(self) -> Iterator[Mistake]:
        left_out, labels = self.settings.leave_out, self.labels
        for label in left_out:
            if label not in labels:
                what = f"there is no label {label!r}; the task has {_all(labels)}."
                yield Mistake("leave_out", what)
        if set(left_out) >= set(labels):
            what = "leaves out every label, so that nothing counts. Name fewer."
            yield Mistake("leave_out", what)


class MicroF1(Micro):
    """F1 of the predictions of all classes together."""

    name, title, hub_name = "micro_f1", "micro F1", "f1"
    reported = ("labels",)


class MicroPrecision(Micro):
    """Share of the predictions, of all classes together, that are right."""

    name, title, hub_name = "micro_precision", "micro precision", "precision"
    of = staticmethod(precision)


class MicroRecall(Micro):
    """Share of the labels, of all classes together, that are predicted."""

    name, title, hub_name = "micro_recall", "micro recall", "recall"
    of = staticmethod(recall)


class Macro(MeanOfClasses[Indicated]):
    """Mean of the classes."""

    over: ClassVar[tuple[Over, ...]] = ("classes",)

    def counts(self, predictions: Indicated) -> np.ndarray:
        predicted, there = predictions.indicators()
        return np.hstack([predicted & there, predicted, there]).astype(np.float64)


class MacroF1(Macro):
    """Mean of the classes' F1. Where each example has one class, one that is neither there nor
    predicted is not part of it; of several labels, its F1 is 0."""

    name, title, hub_name = "macro_f1", "macro F1", "f1"
    reported: ClassVar[tuple[Over, ...]] = ("classes",)


class MacroPrecision(Macro):
    """Mean of the classes' precision, which is 0 of a class that is there and never predicted."""

    name, title, hub_name = "macro_precision", "macro precision", "precision"
    of = staticmethod(precision)


class MacroRecall(Macro):
    """Mean of the classes' recall, which is 0 of a class that is predicted and not there."""

    name, title, hub_name = "macro_recall", "macro recall", "recall"
    of = staticmethod(recall)


class OfAllLabels(Macro):
    """Mean of all labels, which is what scikit-learn makes of several for each example: of one that
    is neither there nor predicted it is 0."""

    over = ("labels",)

    def score(self, sums: np.ndarray) -> np.ndarray:
        return self.of(*np.split(sums, 3, axis=-1)).mean(axis=-1)


class LabelsMacroF1(OfAllLabels, MacroF1):
    reported = ("labels",)


class LabelsMacroPrecision(OfAllLabels, MacroPrecision):
    pass


class LabelsMacroRecall(OfAllLabels, MacroRecall):
    pass


class MacroAUC(Metric[ManyLabels]):
    """Mean of the labels' AUC. A label that all examples have, or none, is not part of it."""

    name, title, hub_name = "macro_auc", "macro AUC", "roc_auc"
    over = ("labels",)

    def weighted(self, predictions: ManyLabels, weights: np.ndarray) -> np.ndarray:
        values = []
        for logits, labels in zip(predictions.logits.T, predictions.labels.T, strict=True):
            known = labels >= 0
            values.append(auc(logits[known], labels[known] == 1, weights[:, known]))
        each = np.stack(values)
        defined = ~np.isnan(each)
        return ratio(np.where(defined, each, 0.0).sum(axis=0), defined.sum(axis=0), np.nan)

    def no_value(self, counts: np.ndarray, examples: int) -> str | None:
        if ((counts > 0) & (counts < examples)).any():
            return None
        return (
            "an AUC needs examples with a label and others without it, and of its "
            f"{examples:,} each label is on all or on none"
        )


# ------------------------------------------------------------------------- of probabilities


class ECE(CountMetric[OneClass]):
    """Expected calibration error: how far the probability of the predicted class is from the share
    of right predictions, in bins of equal width (Guo et al. 2017)."""

    name, title = "ece", "ECE"
    over = reported = ("classes",)
    higher_is_better = False

    class Settings(MetricSettings):
        bins: Count = 15
        """So many."""

    def counts(self, predictions: OneClass) -> np.ndarray:
        """Of each bin, right less confidence; 1 for the example: float64 [N, bins + 1]."""
        bins = self.settings.bins
        excess = (predictions.predicted == predictions.labels) - predictions.confidence
        counts = np.zeros((len(predictions), bins + 1))
        counts[np.arange(len(predictions)), bin_of(predictions.confidence, bins)] = excess
        counts[:, bins] = 1.0
        return counts

    def score(self, sums: np.ndarray) -> np.ndarray:
        return ratio(np.abs(sums[..., :-1]).sum(axis=-1), sums[..., -1], np.nan)


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


def bin_of(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Of equal bins of (0, 1], each without its lower bound, the number from 0: int64 [N]."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def _counts_of(predictions: Indicated, classes: list[int]) -> np.ndarray:
    """float64 [N, 3]: of these classes, how many are right, predicted, there."""
    predicted, there = (part[:, classes] for part in predictions.indicators())
    return stacked(*(part.sum(axis=1) for part in (predicted & there, predicted, there)))


def _all(names: Sequence[str]) -> str:
    return ", ".join(names)
