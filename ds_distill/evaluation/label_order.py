"""Whether a classifier's labels may be in another order than the task's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import bdtr, bdtrc  # scipy.stats takes a second to import

from ds_distill.evaluation.predictions import confusion_matrix

CHANCE = 0.025
"""How often one as good as the commonest label may pass for a worse one, by the exact binomial
test of one side."""

DEVIATIONS = 1.96
"""Of the difference of two counts, sqrt(n + m) each: what chance alone is taken to explain."""


@dataclass(frozen=True)
class LabelDoubt:
    """A classifier that is no better than always answering the commonest label, or that would make
    at most half of its errors if its labels were in another order."""

    examples: int
    accuracy: float
    majority: str
    """The commonest label."""
    share: float
    """Of the commonest label."""
    order: list[int] | None
    """Label for which each output most likely stands; None where no other order is better than the
    commonest label."""
    accuracy_in_order: float
    scores: tuple[float, float] | None = None
    """By the task's metric, where that is another: the classifier's, and that of always answering
    the commonest label."""
    is_better: bool = False
    """Whether the first of the scores is better: a detector of a rare class may be right less often
    than one that never finds it."""

    @property
    def is_worthless(self) -> bool:
        return self.accuracy <= self.share and not self.is_better

    @property
    def is_below(self) -> bool:
        """Whether it is right less often than that label, beyond chance, and no better by the
        task's metric."""
        right = round(self.accuracy * self.examples)
        return not self.is_better and bool(bdtr(right, self.examples, self.share) < CHANCE)

    @property
    def is_reordered(self) -> bool:
        """Whether it is right no more often than that label, and in another order more often beyond
        chance."""
        right = round(self.accuracy_in_order * self.examples)
        better = bool(bdtrc(right - 1, self.examples, self.share) < CHANCE)
        return self.accuracy <= self.share and self.order is not None and better

    @property
    def is_halved(self) -> bool:
        """Whether another order leaves at most half of the errors."""
        wrong = [round(self.examples * (1 - a)) for a in (self.accuracy, self.accuracy_in_order)]
        return self.order is not None and wrong[1] <= wrong[0] / 2

    @property
    def is_doubtful(self) -> bool:
        return self.is_worthless or self.is_reordered or self.is_halved


@dataclass(frozen=True)
class NumberDoubt:
    """A model of numbers whose squared error is above that of always the mean label."""

    error: float
    """Mean squared error."""
    error_of_mean: float
    is_worthless = True


def label_doubt(logits: np.ndarray, labels: np.ndarray, names: list[str]) -> LabelDoubt | None:
    """None where there is none, or nothing is labelled.

    The likeliest order is the one under which most examples would be right: an assignment on the
    confusion matrix, in which an output leaves the label that it is said to stand for only if that
    gains more examples than chance (`DEVIATIONS`). An expert of some classes gains next to nothing
    by another order, because what it takes the others for are classes of its own.

    logits: float [N, C] in the order of `names`; labels: int [N], -1 unlabelled.
    """
    known = labels >= 0
    if not known.any():
        return None
    truth, predicted = labels[known], logits[known].argmax(axis=1)
    confusion = confusion_matrix(truth, predicted, len(names))
    totals = confusion.sum(axis=1)
    counts = confusion.T.astype(np.float64)  # a row for each output
    by_chance = DEVIATIONS * np.sqrt(counts + counts.diagonal()[:, None])
    np.fill_diagonal(by_chance, 0.0)
    outputs, order = linear_sum_assignment(counts - by_chance, maximize=True)
    right, best = int(confusion.trace()), int(confusion.T[outputs, order].sum())
    majority = int(totals.argmax())
    better = best > max(right, totals[majority])
    found = LabelDoubt(
        examples=len(truth),
        accuracy=right / len(truth),
        majority=names[majority],
        share=float(totals[majority] / len(truth)),
        order=order.tolist() if better else None,
        accuracy_in_order=best / len(truth),
    )
    return found if found.is_doubtful else None
