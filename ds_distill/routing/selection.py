"""Which teachers qualify: those that are best at some class (thesis 4.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ds_distill.data.labels import is_labelled
from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.multi_label import TWO, experts_by_f1, f1_of
from ds_distill.routing.partial_teachers import Classes, unknown_to_all

CHANCE = 0.025
"""How often a teacher that knows nothing may pass for one that does, over all classes together."""


def unqualified(
    logits: Mapping[str, np.ndarray],
    truth: np.ndarray,
    labels: Sequence[str],
    classes: Classes | None = None,
) -> dict[str, str]:
    """The teachers that do not qualify, and why. At least one teacher qualifies, and of each class
    that some teacher knows one that does.

    First leave those that predict no class better than chance: one that always predicts the same
    class is right on all of its examples, and would be its expert. Then those that are best at no
    class among the rest.

    logits: float [N, C] by teacher. truth: int [N] class ids, or int [N, C] of 0 and 1 where an
        example has any number of labels; -1 unlabelled (left out). classes: of partial teachers.
    """
    noun = "label" if truth.ndim > 1 else "class"
    known = is_labelled(truth)
    logits = {name: scores[known] for name, scores in logits.items()}
    truth = truth[known]
    informed = [name for name, scores in logits.items() if _is_informed(scores, truth)]
    found = {
        name: f"predicts no {noun} better than chance" for name in logits if name not in informed
    }
    if not informed:  # nothing tells one from another
        found, informed = {}, list(logits)
    scores, experts = _experts({name: logits[name] for name in informed}, truth, labels)
    measure = "F1" if truth.ndim > 1 else "accuracy"
    for number, name in enumerate(informed):
        if number not in experts:
            nearest = int((scores.max(axis=0) - scores[number]).argmin())
            best = experts[nearest]
            found[name] = (
                f"is best at no {noun}: nearest on {labels[nearest]}, with {measure} "
                f"{scores[number, nearest]:.1%} against {scores[best, nearest]:.1%} of "
                f"{informed[best]}"
            )
    classes, count = classes or {}, len(labels)
    for name in [one for one in logits if one in found]:
        stay = [one for one in logits if one not in found]
        lacking = unknown_to_all(stay, classes, count)
        if {*lacking} - {*unknown_to_all([name], classes, count)}:
            del found[name]  # nobody else teaches these
    return {name: found[name] for name in logits if name in found}


def _is_informed(logits: np.ndarray, truth: np.ndarray) -> bool:
    """Whether a teacher predicts some class for more of its examples than predictions drawn by lot
    would: Fisher's exact test of each class. logits: float [N, C]; truth: int [N] or [N, C], all
    labelled."""
    count, classes = logits.shape
    if truth.ndim > 1:
        predicted, actual = logits > 0, truth == 1
    else:
        predicted = logits.argmax(axis=1)[:, None] == np.arange(classes)
        actual = truth[:, None] == np.arange(classes)
    right = (predicted & actual).sum(axis=0)
    from scipy.stats import hypergeom  # half a second, which most processes do not need

    by_lot = hypergeom.sf(right - 1, count, actual.sum(axis=0), predicted.sum(axis=0))
    return bool((by_lot < CHANCE / classes).any())


def _experts(
    logits: Mapping[str, np.ndarray], truth: np.ndarray, labels: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """What experts are chosen by, float64 [T, C], and the expert of each class, int [C]."""
    if truth.ndim == 1:
        table = ExpertiseTable.measure(logits, truth, labels)
        return table.per_class, table.experts
    tables = [
        ExpertiseTable.measure(
            {
                name: np.stack([np.zeros(len(truth)), scores[:, label]], axis=1)
                for name, scores in logits.items()
            },
            truth[:, label],
            TWO,
        )
        for label in range(len(labels))
    ]
    f1 = f1_of(tables)
    return f1, experts_by_f1(f1, list(logits))
