"""What teachers' predictions have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from ds_distill.evaluation.predictions import ClassPredictions, LabelPredictions, TagPredictions

Predictions = ClassPredictions | LabelPredictions | TagPredictions


def agreement(teachers: Mapping[str, Predictions]) -> dict[str, float]:
    """How often two teachers predict the same, by pair."""
    return {
        f"{one}, {other}": float((teachers[one].predicted == teachers[other].predicted).mean())
        for one, other in combinations(teachers, 2)
    }


def any_of(teachers: Sequence[Predictions]) -> Predictions:
    """Of each example, or of each of its labels or words, what the first teacher that is right
    predicts; the first, if none is."""
    right = np.stack([teacher.predicted == teacher.labels for teacher in teachers])
    logits = np.stack([teacher.logits for teacher in teachers])
    first = right.argmax(axis=0)
    first = first.reshape(*first.shape, *[1] * (logits.ndim - right.ndim))
    chosen = np.take_along_axis(logits, np.broadcast_to(first, logits.shape[1:])[None], axis=0)[0]
    return replace(teachers[0], logits=chosen)
