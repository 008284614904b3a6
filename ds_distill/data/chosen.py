"""Which examples of a split a phase trains on."""

from __future__ import annotations

import numpy as np

from ds_distill.data.batches import Examples
from ds_distill.data.examples import keep_per_class
from ds_distill.data.schedule import keep_share_of_others
from ds_distill.recipe.phases import FineTune


def chosen_examples(phase: FineTune, examples: Examples, labels: list[str]) -> np.ndarray:
    """Indices of the examples that a phase trains on, int64 [n], ascending: labelled, in focus,
    capped per class.

    labels: the task's. Raises ValueError where one of the focus is none of them.
    """
    chosen = np.flatnonzero(examples.labelled)
    if phase.focus is not None:
        part = examples.at(chosen)
        classes = [labels.index(label) for label in phase.focus.classes]
        share = phase.focus.share_of_others
        chosen = chosen[keep_share_of_others(part.labels, part.keys, classes, share)]
    if phase.per_class is not None:
        part = examples.at(chosen)
        capped = keep_per_class(part.labels, part.keys.numpy(), phase.per_class)
        chosen = chosen[capped]
    return chosen
