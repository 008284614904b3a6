"""What a model does on each class, beside its teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_distill.reporting.confusions import confusion_counts
from ds_distill.reporting.page import worst_and_best

SHOWN = 20
"""Of a class's name in a figure, characters."""


@dataclass(frozen=True)
class ClassScores:
    """Of a model on a class; of labels and entity types likewise."""

    examples: int
    """That have it."""
    precision: float | None
    """None where the class is never predicted."""
    recall: float | None
    """None where no example has the class, and F1 too."""
    f1: float | None


def class_scores(model: Mapping[str, Any]) -> dict[str, ClassScores]:
    """By class; empty where an evaluation has no counts of classes.

    model: of an evaluation's record.
    """
    return {
        label: ClassScores(
            there,
            right / predicted if predicted else None,
            right / there if there else None,
            2 * right / (predicted + there) if there else None,
        )
        for label, (right, predicted, there) in _counts(model).items()
    }


def _counts(model: Mapping[str, Any]) -> dict[str, list[int]]:
    """By class how many examples are right, predicted, there."""
    if "confusion" not in model:
        return dict(model.get("class_counts", {}))
    names = list(model["per_class"])
    found = [[0, 0, 0] for _ in names]
    for (label, predicted), count in confusion_counts(model["confusion"]).items():
        found[label][0] += count if label == predicted else 0
        found[predicted][1] += count
        found[label][2] += count
    return dict(zip(names, found, strict=True))


@dataclass(frozen=True)
class ClassRow:
    label: str
    scores: ClassScores
    differences: dict[str, float | None]
    """By teacher, of the F1 to its."""


@dataclass(frozen=True)
class ByClass:
    """A model beside its teachers."""

    judged: str
    teachers: list[str]
    shown: list[ClassRow]
    folded: list[ClassRow]
    """Of many classes the rest; see `worst_and_best`."""

    @property
    def span(self) -> tuple[float, float]:
        """The lowest and the highest of the differences that are shown, and of 0."""
        every = [d for row in self.shown for d in row.differences.values() if d is not None]
        low, high = min([0.0, *every]), max([0.0, *every])
        return (low, high) if low < high else (0.0, 1.0)

    def bars(self, teacher: str) -> list[tuple[str, float, float]]:
        """Of a figure: the class's name, shortened, and where the bars of 0 and of its difference
        end, as shares of the way through `span`."""
        low, high = self.span
        zero = -low / (high - low)
        return [
            (shortened(row.label), zero, zero + (row.differences[teacher] or 0.0) / (high - low))
            for row in self.shown
        ]


def shortened(label: str) -> str:
    return label if len(label) <= SHOWN else label[: SHOWN - 1] + "…"


def by_class(models: Mapping[str, Mapping[str, Any]], judged: str) -> ByClass | None:
    """None where there are no counts of classes.

    models: of an evaluation's record, by name.
    """
    own = class_scores(models[judged])
    if not own:
        return None
    of_teachers = {
        name: class_scores(model)
        for name, model in models.items()
        # One that was judged on some of the examples is compared on these, over all classes.
        if model["role"] == "teacher" and name != judged and "not_given" not in model
    }

    def rows(labels: Sequence[str]) -> list[ClassRow]:
        return [
            ClassRow(
                label,
                own[label],
                {name: _less(own[label], of[label]) for name, of in of_teachers.items()},
            )
            for label in labels
        ]

    shown, folded = worst_and_best({label: scores.f1 for label, scores in own.items()})
    return ByClass(judged, list(of_teachers), rows(shown), rows(folded))


def _less(own: ClassScores, other: ClassScores) -> float | None:
    return None if own.f1 is None or other.f1 is None else own.f1 - other.f1
