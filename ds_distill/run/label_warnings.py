"""Warnings of teachers that a labelled split shows to be useless, or to have their labels in
another order than the task's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_distill.data.batches import Examples
from ds_distill.evaluation.label_order import Doubt
from ds_distill.models.configuration import load_config
from ds_distill.models.labels import as_yaml, class_names
from ds_distill.run.context import ModelReference, Run


def warn_of_teachers(
    run: Run,
    phase: str,
    split: str,
    references: list[ModelReference],
    predictions: Mapping[str, Any],
    examples: Examples,
) -> list[str]:
    """Log and return a line for each doubtful teacher; see `TaskKind.doubt`. The label order of a
    teacher that this run trained is not in doubt.

    predictions: of the split's examples, by teacher, as the task's kind makes them.
    """
    warnings = []
    for reference in references:
        found = run.kind.doubt(predictions[reference.name], examples)
        if found is not None and (found.is_worthless or not reference.trained):
            warnings.append(_line(run, reference, split, found))
    return _logged(run, phase, warnings)


def warn_of_one_expert(run: Run, phase: str, split: str, experts: Mapping[str, str]) -> list[str]:
    """Log and return a line where one of the recipe's teachers is best at every class (thesis 6.1).

    experts: the best teacher of each class.
    """
    if len(run.recipe.teachers) == 1 or len(set(experts.values())) > 1:
        return []
    noun = "labels" if run.task.many_labels else "classes"
    line = (
        f"teacher {next(iter(experts.values()))} is best at all {len(experts)} {noun} of {split}: "
        "no other adds a class to what it knows, and to distil it alone may be as good. Compare "
        "with that, or train teachers that differ more."
    )
    return _logged(run, phase, [line])


def _logged(run: Run, phase: str, warnings: list[str]) -> list[str]:
    for line in warnings:
        run.log.info(f"WARNING: {line}")
        run.log.event("warning", phase=phase, text=line)
    return warnings


def _line(run: Run, reference: ModelReference, split: str, found: Doubt) -> str:
    fact = (
        f"teacher {reference.name}: accuracy {found.accuracy:.1%} on {split}, where always "
        f"predicting {found.majority!r} has {found.share:.1%}."
    )
    if reference.trained:
        return fact
    if found.order is None:
        return f"{fact} No other order of its labels would be better than that."
    names = class_names(load_config(reference.model, reference.revision))
    if len(set(names)) < len(names):
        names = [str(number) for number in range(len(names))]
    columns = reference.columns or range(len(run.labels))
    order = {names[columns[at]]: run.labels[label] for at, label in enumerate(found.order)}
    return (
        f"{fact} With its labels in another order it would be {found.accuracy_in_order:.1%}: if "
        f"that is how it was trained, set teachers.{reference.name}.labels to {as_yaml(order)}."
    )
