"""What a model does on each class, beside its teachers: scores, and what it takes for what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_distill.reporting.page import Section, worst_and_best
from ds_distill.reporting.result_tables import POINTS, share
from ds_distill.tables import Cell, Table

MOST = 10
"""Confusions that a page shows."""


def by_class(models: Mapping[str, Any], judged: str, noun: str) -> Section | None:
    """One model on each class, with the differences of F1 to its teachers; None where there are no
    counts of classes.

    models: of an evaluation's record, by name. noun: class, label or type.
    """
    own = _counts(models[judged])
    if not own:
        return None
    scores = {label: _f1(*counts) for label, counts in own.items()}
    teachers = {
        name: {label: _f1(*counts) for label, counts in _counts(model).items()}
        for name, model in models.items()
        # One that was judged on some of the examples is compared on these, over all classes.
        if model["role"] == "teacher" and name != judged and "not_given" not in model
    }

    def row(label: str) -> list[str | Cell]:
        right, predicted, there = own[label]
        mine, theirs = scores[label], (of[label] for of in teachers.values())
        apart = (
            "none" if mine is None or one is None else POINTS.difference_as(mine - one)
            for one in theirs
        )
        found = [share(right, predicted), share(right, there)]
        return [label, f"{there:,}", *found, Cell(share(mine), share=mine), *apart]

    shown, folded = worst_and_best(scores)
    things = "examples" if noun == "class" else "predictions"
    notes = ["Those on which the F1 is worst and best."] if folded else []
    notes.append(
        f"Precision: of the {things} that are predicted to be of a {noun} the share that are; "
        "recall: of those that are the share that is found; F1: their harmonic mean. The "
        "differences are points of F1, of few examples each: no interval says which are beyond "
        "chance."
    )
    heads = [noun, "there", "precision", "recall", "F1", *(f"to {name}" for name in teachers)]
    rows, more = [*map(row, shown)], [*map(row, folded)]
    beside = ", beside each teacher" if teachers else ""
    table = Table("", heads, rows, notes, more, shipped="F1", narrow=True)
    return Section(f"How {judged} does on each {noun}{beside}", [table])


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


def _f1(right: int, predicted: int, there: int) -> float | None:
    return 2 * right / (predicted + there) if there else None


def confusions(models: Mapping[str, Any], judged: str) -> Section | None:
    """The confusions of one model that cost it most examples, the commonest first, and of the same
    examples the share that each other model takes for that class too; None without any.

    models: of an evaluation over classes, by name.
    """
    names, totals = list(models[judged]["per_class"]), _counts(models[judged])
    counts = {
        name: confusion_counts(model["confusion"])
        for name, model in models.items()
        if name == judged or "not_given" not in model  # that one was asked of fewer examples
    }
    wrong = {pair: count for pair, count in counts[judged].items() if pair[0] != pair[1]}
    rows: list[list[str | Cell]] = []
    for pair in sorted(wrong, key=lambda pair: (-wrong[pair], pair))[:MOST]:
        label, predicted = (names[at] for at in pair)
        whole = totals[label][2]
        shares = [of.get(pair, 0) / whole for of in counts.values()]
        cells = [Cell(share(one), share=one) for one in shares]
        rows.append([f"{label}: {predicted}", f"{whole:,}", *cells])
    note = (
        f"The commonest mistakes of {judged}, and of the same examples of a class the share that "
        "each other model takes for that class too: what the teachers do as well it may have "
        "learnt from them."
    )
    heads = ["class: predicted", "examples", *counts]
    table = Table("", heads, rows, [note], shipped=judged, narrow=True)
    return Section(f"What {judged} takes for what", [table]) if rows else None


def confusion_counts(confusion: Any) -> dict[tuple[int, int], int]:
    """(class, predicted) -> examples, without those that are 0.

    confusion: as `ds_distill.evaluation.predictions.confusion_counts` makes it.
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
