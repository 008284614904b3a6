"""Whom a policy follows: by class, and on examples where teachers disagree.

T teachers, N examples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import softmax

from ds_distill.seen import Target

ALIKE = 1e-6
"""Of weights that are the same number up to rounding."""


def followed_by_class(
    weights: torch.Tensor, truth: np.ndarray, labels: Sequence[str], teachers: Sequence[str]
) -> dict[str, dict[str, float]]:
    """By class and teacher the mean share of a policy's weight on the examples of the class; empty
    where the policy weighs all examples alike, and without classes that have no example.

    weights: float32 [T, N], or [T, N, C] where each label has its own. truth: int [N] class ids, or
        int [N, C] of 0 and 1.
    """
    shares = (weights / weights.sum(dim=0, keepdim=True).clamp(min=1e-12)).numpy()
    if np.ptp(shares, axis=1).max(initial=0.0) < ALIKE:
        return {}
    found = {}
    for number, label in enumerate(labels):
        here = (truth == number) if truth.ndim == 1 else truth[:, number] == 1
        if here.any():
            own = shares if shares.ndim == 2 else shares[:, :, number]
            means = own[:, here].mean(axis=1).round(4).tolist()
            found[label] = dict(zip(teachers, means, strict=True))
    return found


@dataclass(frozen=True)
class Answer:
    label: str
    """The most probable class."""
    probability: float


@dataclass(frozen=True)
class Disagreement:
    """An example for which teachers predict several classes."""

    row: int
    """Its place among all that were compared."""
    label: str
    teachers: dict[str, Answer]
    target: Answer
    """What the policy made of them."""
    followed: dict[str, float]
    """By teacher, the share of the policy's weight."""


def disagreements(
    logits: Mapping[str, np.ndarray],
    target: Target,
    truth: np.ndarray,
    labels: Sequence[str],
    count: int,
    places: np.ndarray,
) -> list[Disagreement]:
    """`count` of them at most, evenly spaced among all that there are.

    logits: by teacher, float [N, C]. target: the policy's, logits [N, C]. truth: int [N].
    places: int [N], what `row` is of each.
    """
    predicted = np.stack([of.argmax(axis=1) for of in logits.values()])
    [rows] = np.nonzero((predicted != predicted[0]).any(axis=0))
    if len(rows) > count:
        rows = rows[np.linspace(0, len(rows) - 1, count).astype(int)] if count else rows[:0]
    assert target.logits is not None, "compared policies have one"
    routed, weights = target.logits.numpy(), target.weights.numpy()

    def answer(of_row: np.ndarray) -> Answer:
        probabilities = softmax(of_row.astype(np.float64))
        best = int(probabilities.argmax())
        return Answer(labels[best], round(float(probabilities[best]), 4))

    return [
        Disagreement(
            int(places[row]),
            labels[truth[row]],
            {name: answer(of[row]) for name, of in logits.items()},
            answer(routed[row]),
            {
                name: round(float(weights[number, row] / max(weights[:, row].sum(), 1e-12)), 4)
                for number, name in enumerate(logits)
            },
        )
        for row in rows.tolist()
    ]
