"""The expertise table: how often each teacher is right, per class and overall (thesis 4.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class ExpertiseTable:
    """Counts of right answers on a held-out split."""

    teachers: tuple[str, ...]
    labels: tuple[str, ...]
    correct: np.ndarray
    """int64 [T, C]: examples of class c that teacher t got right."""
    total: np.ndarray
    """int64 [C]: examples of class c."""

    @staticmethod
    def measure(
        logits: Mapping[str, np.ndarray], truth: np.ndarray, labels: Sequence[str]
    ) -> ExpertiseTable:
        """logits: float [N, C] by teacher; truth: int [N] class ids, -1 unlabelled (left out)."""
        known = truth >= 0
        count = len(labels)
        correct = np.stack(
            [
                np.bincount(truth[known & (scores.argmax(axis=1) == truth)], minlength=count)
                for scores in logits.values()
            ]
        )
        total = np.bincount(truth[known], minlength=count)
        return ExpertiseTable(tuple(logits), tuple(labels), correct, total)

    @property
    def per_class(self) -> np.ndarray:
        """Accuracy: float64 [T, C]; 0 where the split has no example of the class."""
        return self.correct / np.maximum(self.total, 1)

    @property
    def overall(self) -> np.ndarray:
        """Accuracy over all examples: float64 [T]."""
        return self.correct.sum(axis=1) / max(int(self.total.sum()), 1)

    @property
    def ranking(self) -> np.ndarray:
        """Teachers from most to least accurate overall, ties in the order of their names, so
        that the order of teachers in a recipe does not matter: int64 [T]."""
        order = sorted(
            range(len(self.teachers)), key=lambda t: (-self.overall[t], self.teachers[t])
        )
        return np.array(order, dtype=np.int64)

    @property
    def experts(self) -> np.ndarray:
        """The best teacher of each class: int64 [C]. The thesis breaks ties at random; here
        the teacher that is better overall takes them, so that a run can be repeated."""
        ranking = self.ranking
        return ranking[self.per_class[ranking].argmax(axis=0)]

    def to_json(self) -> dict[str, Any]:
        return {
            "teachers": list(self.teachers),
            "labels": list(self.labels),
            "correct": self.correct.tolist(),
            "total": self.total.tolist(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ExpertiseTable:
        return ExpertiseTable(
            tuple(data["teachers"]),
            tuple(data["labels"]),
            np.array(data["correct"], dtype=np.int64),
            np.array(data["total"], dtype=np.int64),
        )
