"""What is right without reading the text: the answer that training shows most often."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ds_distill.evaluation.predictions import TokenScores


def class_log_shares(labels: np.ndarray, classes: int) -> np.ndarray:
    """The logarithm of the share of each class: float64 [C], -inf of a class that is not there.

    labels: int [N], -1 unlabelled (left out).
    """
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    with np.errstate(divide="ignore"):
        shares: np.ndarray = np.log(counts / counts.sum())
    return shares


@dataclass(frozen=True)
class Unigram:
    """Each token as likely as it is frequent in the training text, whatever stands around it."""

    token: int
    """The most frequent one, which it always answers."""
    log_probs: np.ndarray
    """float64 [V]; of special tokens, which are never masked, -inf."""

    @staticmethod
    def of(counts: np.ndarray, special_ids: tuple[int, ...]) -> Unigram:
        """counts: int64 [V], each token's in the training text; one is added to each, so that one
        that does not stand there is not impossible."""
        counts = counts.astype(np.float64) + 1.0
        counts[list(special_ids)] = 0.0
        with np.errstate(divide="ignore"):
            return Unigram(int(counts.argmax()), np.log(counts / counts.sum()))

    def score(self, masked: np.ndarray, example: np.ndarray, examples: int) -> TokenScores:
        """masked: the true ids of n masked tokens, int [n]; example: the number of the example of
        each, int [n], below `examples`."""
        sums = partial(np.bincount, example, minlength=examples)
        right = (masked == self.token).astype(np.float64)
        return TokenScores(sums(-self.log_probs[masked]), sums(right), sums().astype(np.float64))
