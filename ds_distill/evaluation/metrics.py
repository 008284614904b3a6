"""Quality of predictions, by scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of labelled examples whose largest logit is the label's.

    logits: float [N, C]; labels: int [N], -1 unlabelled.
    """
    known = labels >= 0
    return float(accuracy_score(labels[known], logits[known].argmax(axis=1)))


def classification_report(
    logits: np.ndarray, labels: np.ndarray, names: list[str]
) -> dict[str, Any]:
    """Accuracy overall and per class (recall), macro F1, confusion matrix, examples.

    logits: float [N, C]; labels: int [N], -1 unlabelled (left out). A class without examples
    has the accuracy None; one that is neither there nor predicted is not part of macro F1.
    """
    known = labels >= 0
    truth, predicted = labels[known], logits[known].argmax(axis=1)
    classes = np.arange(len(names))
    confusion = confusion_matrix(truth, predicted, labels=classes)
    totals = confusion.sum(axis=1)
    macro_f1 = f1_score(truth, predicted, labels=classes, average="macro", zero_division=np.nan)
    return {
        "examples": int(known.sum()),
        "accuracy": float(accuracy_score(truth, predicted)),
        "macro_f1": float(macro_f1),
        "per_class": {
            name: float(confusion[index, index] / totals[index]) if totals[index] else None
            for index, name in enumerate(names)
        },
        "confusion": confusion.tolist(),
    }


def paired_interval(
    first: np.ndarray, second: np.ndarray, *, seed: int = 0, draws: int = 2000
) -> tuple[float, float]:
    """95% bootstrap interval of the difference in accuracy of two models on the same examples.

    first, second: bool [N], whether each example was answered rightly.
    """
    generator = np.random.default_rng(seed)
    difference = first.astype(np.int8) - second.astype(np.int8)
    # Examples differ only in this value, so a bootstrap sample is a multinomial draw.
    values, counts = np.unique(difference, return_counts=True)
    samples = generator.multinomial(len(difference), counts / len(difference), size=draws)
    means = samples @ values / len(difference)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
