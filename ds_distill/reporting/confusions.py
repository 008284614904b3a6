"""Which class a model takes for which, and whether the other models do so too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST = 10
"""Confusions that a page shows."""


@dataclass(frozen=True)
class Confusion:
    """Examples of one class that are predicted to be of another."""

    label: str
    predicted: str
    examples: int
    """Of the class, in all."""
    shares: dict[str, float]
    """By model, of these examples the share that it takes for the other class."""


def commonest_confusions(models: Mapping[str, dict[str, Any]], judged: str) -> list[Confusion]:
    """The confusions of one model that cost it most examples, the commonest first.

    models: of an evaluation over classes, by name; judged: the one whose confusions they are.
    """
    names = list(models[judged]["per_class"])
    counts = {
        name: confusion_counts(model["confusion"])
        for name, model in models.items()
        if name == judged or "not_given" not in model  # that one was asked of fewer examples
    }
    totals = [0] * len(names)
    for (label, _), count in counts[judged].items():
        totals[label] += count
    wrong = {pair: count for pair, count in counts[judged].items() if pair[0] != pair[1]}
    ranked = sorted(wrong, key=lambda pair: (-wrong[pair], pair))[:MOST]
    return [
        Confusion(
            names[label],
            names[predicted],
            totals[label],
            {
                name: of_model.get((label, predicted), 0) / totals[label]
                for name, of_model in counts.items()
            },
        )
        for label, predicted in ranked
    ]


def confusion_counts(confusion: Any) -> dict[tuple[int, int], int]:
    """(class, predicted) -> examples, without those that are 0.

    confusion: as `ds_distill.evaluation.scores.confusion_counts` makes it.
    """
    if isinstance(confusion, dict):
        cells = zip(confusion["true"], confusion["predicted"], confusion["count"], strict=True)
        return {(label, predicted): count for label, predicted, count in cells}
    return {
        (label, predicted): count
        for label, row in enumerate(confusion)
        for predicted, count in enumerate(row)
        if count
    }
