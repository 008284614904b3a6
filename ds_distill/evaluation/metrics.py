"""Quality of predictions: the functions behind `ds_distill.parts.metrics`, and reports of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from ds_distill.errors import UserError
from ds_distill.parts.metrics import METRICS


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of labelled examples whose largest logit is the label's.

    logits: float [N, C]; labels: int [N], -1 unlabelled.
    """
    known = labels >= 0
    return float(accuracy_score(labels[known], logits[known].argmax(axis=1)))


def macro_f1(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the classes' F1; a class that is neither there nor predicted is not part of it.

    logits: float [N, C]; labels: int [N].
    """
    classes, predicted = np.arange(logits.shape[1]), logits.argmax(axis=1)
    return float(f1_score(labels, predicted, labels=classes, average="macro", zero_division=np.nan))


def classification_report(
    logits: np.ndarray, labels: np.ndarray, names: list[str]
) -> dict[str, Any]:
    """Examples, all metrics over classes, accuracy per class (recall), confusion matrix.

    logits: float [N, C]; labels: int [N], -1 unlabelled (left out). A class without examples
    has the accuracy None.
    """
    known = labels >= 0
    scores, truth = logits[known], labels[known]
    confusion = confusion_matrix(truth, scores.argmax(axis=1), labels=np.arange(len(names)))
    totals = confusion.sum(axis=1)
    metrics = METRICS["classes"]
    return {
        "examples": int(known.sum()),
        **{name: float(entry.load()(scores, truth)) for name, entry in metrics.items()},
        "per_class": {
            name: float(confusion[index, index] / totals[index]) if totals[index] else None
            for index, name in enumerate(names)
        },
        "confusion": confusion.tolist(),
    }


@dataclass(frozen=True)
class TokenScores:
    """How a masked-LM does on each of N examples. All float64 [N]."""

    loss: np.ndarray
    """Sum of the cross-entropies of its masked tokens."""
    right: np.ndarray
    """How many of them have the largest logit."""
    tokens: np.ndarray
    """How many of its tokens are masked."""


def token_accuracy(scores: TokenScores) -> float:
    """Share of the masked tokens that have the largest logit."""
    return float(scores.right.sum() / scores.tokens.sum())


def token_loss(scores: TokenScores) -> float:
    """Mean cross-entropy of the masked tokens, in nats."""
    return float(scores.loss.sum() / scores.tokens.sum())


def perplexity(scores: TokenScores) -> float:
    """The exponential of the mean cross-entropy."""
    return float(np.exp(token_loss(scores)))


def masked_lm_report(scores: TokenScores) -> dict[str, Any]:
    """Examples, masked tokens, and all metrics over these. Raises UserError when no token is
    masked."""
    tokens = int(scores.tokens.sum())
    if tokens == 0:
        raise UserError(
            "a split has no token that is masked, so there is nothing to measure: its texts are "
            "too few or too short for task.masking.rate. Add texts to it, or raise the rate."
        )
    metrics = METRICS["masked tokens"]
    return {
        "examples": len(scores.tokens),
        "tokens": tokens,
        **{name: float(entry.load()(scores)) for name, entry in metrics.items()},
    }


def paired_interval(
    first: np.ndarray,
    second: np.ndarray,
    tokens: np.ndarray | None = None,
    *,
    groups: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> tuple[float, float]:
    """95% bootstrap interval of the difference in accuracy of two models on the same examples.

    first, second: how many right answers each example has: [N], at most 1 or `tokens`.
    tokens: predictions of each example, [N], at least one of them above 0. Examples are
        resampled, not tokens: those of one text are not independent. None: one each.
    groups: numbers of what the examples were taken from, int [N]; then groups are drawn, because
        examples of one file are not independent either.
    """
    generator = np.random.default_rng(seed)
    difference = first.astype(np.int64) - second.astype(np.int64)
    predictions = np.ones_like(difference) if tokens is None else tokens.astype(np.int64)
    if groups is not None:
        _, group = np.unique(groups, return_inverse=True)
        difference, predictions = (
            np.bincount(group, values).astype(np.int64) for values in (difference, predictions)
        )
    # Examples differ only in these values, so a bootstrap sample is multinomial.
    kinds, counts = np.unique(np.stack([difference, predictions]), axis=1, return_counts=True)
    samples = generator.multinomial(len(difference), counts / len(difference), size=resamples)
    means = (samples @ kinds[0]) / np.maximum(samples @ kinds[1], 1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
