"""Warnings of teachers that a labelled split shows to be useless, or to have their labels in
another order than the task's, and of a split that is too small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ds_distill.data.batches import Examples
from ds_distill.data.groups import few_groups
from ds_distill.evaluation.label_order import LabelDoubt, NumberDoubt
from ds_distill.models.configuration import load_config, output_function
from ds_distill.models.labels import LabelMap, class_names
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.yaml_tree import one_line
from ds_distill.run.run import Run


def warn_of_teachers(
    run: Run,
    phase: str,
    split: str,
    references: list[ModelReference],
    predictions: Mapping[str, Any],
    examples: Examples,
    role: str = "teacher",
) -> list[str]:
    """Log and return a line for each doubtful teacher; see `TaskKind.label_doubt`. The label order
    of a teacher that this run trained is not in doubt.

    predictions: of the split's examples, by teacher, as the task's kind makes them. role: what they
        are called: a checkpoint that is only evaluated teaches nobody.
    """
    warnings = []
    for reference in references:
        classes = classes_of(reference)
        found = run.kind.label_doubt(predictions[reference.name], examples, classes)
        if found is not None and (found.is_worthless or not reference.trained):
            text = doubt_text(run, reference, split, found, classes)
            name = reference.name if reference.name == role else f"{role} {reference.name}"
            warnings.append(f"{name}: {text}")
    return _logged(run, phase, warnings)


def classes_of(reference: ModelReference) -> Sequence[int] | None:
    """The class ids that a partial teacher knows; None for one that knows all."""
    return None if reference.label_map is None else reference.label_map.classes


def known_labels(run: Run, reference: ModelReference) -> dict[str, Any]:
    """`knows`, of a partial teacher, for its record: its labels, and how many the task has."""
    classes = classes_of(reference)
    if classes is None:
        return {}
    return {"knows": {"labels": [run.labels[n] for n in classes], "of": len(run.labels)}}


def warn_of_one_expert(run: Run, phase: str, split: str, experts: Mapping[str, str]) -> list[str]:
    """Log and return a line where one of the recipe's teachers is best at every class (thesis 6.1).

    experts: the best teacher of each class.
    """
    if len(run.recipe.teachers) == 1 or len(set(experts.values())) > 1:
        return []
    noun = "labels" if run.task.predicts == "labels" else "classes"
    line = (
        f"teacher {next(iter(experts.values()))} is best at all {len(experts)} {noun} of {split}: "
        "no other adds a class to what it knows, and to distil it alone may be as good. Compare "
        "with that, or train teachers that differ more."
    )
    return _logged(run, phase, [line])


def warn_of_few_groups(run: Run, phase: str, split: str, group_keys: np.ndarray) -> list[str]:
    """Log and return a line where a split has so few groups that intervals are too narrow."""
    line = few_groups(split, group_keys)
    return _logged(run, phase, [] if line is None else [line])


def _logged(run: Run, phase: str, warnings: list[str]) -> list[str]:
    for line in warnings:
        run.log.info(f"WARNING: {line}")
        run.log.event("warning", phase=phase, text=line)
    return warnings


def doubt_text(
    run: Run,
    reference: ModelReference,
    split: str,
    found: LabelDoubt | NumberDoubt,
    classes: Sequence[int] | None,
) -> str:
    """What is doubtful of a teacher, and what may be done.

    classes: class ids on whose examples it was judged; None for all.
    """
    if isinstance(found, NumberDoubt):
        return _of_numbers(reference, split, found)
    where = split if classes is None else f"the examples of its classes in {split}"
    own, constant = f"accuracy {found.accuracy:.1%}", f"{found.share:.1%}"
    if found.scores is not None:
        metric = run.kind.metric
        value, of_constant = map(metric.shown_as, found.scores)
        own, constant = f"{own} and {metric.title} {value}", f"{constant} and {of_constant}"
    fact = f"{own} on {where}, where always predicting {found.majority!r} has {constant}."
    if reference.trained:
        return fact
    if found.order is None:
        return f"{fact} No other order of its labels would be better than that."
    if reference.predictions is not None:
        meant = dict(zip(run.labels, (run.labels[label] for label in found.order), strict=True))
        return (
            f"{fact} With its labels in another order it would be {found.accuracy_in_order:.1%}: "
            f"if {reference.predictions} has them so, correct it: {one_line(meant)}."
        )
    names = class_names(load_config(reference.model, reference.revision))
    if len(set(names)) < len(names):
        names = [str(number) for number in range(len(names))]
    whole = LabelMap(tuple((number,) for number in range(len(run.labels))))
    mapped = reference.label_map or whole
    order: dict[str, str | None] = {
        names[output]: run.labels[mapped.known[label]]
        for outputs, label in zip(mapped.outputs, found.order, strict=True)
        for output in outputs
    }
    return (
        f"{fact} With its labels in another order it would be {found.accuracy_in_order:.1%}: if "
        f"that is how it was trained, set teachers.{reference.name}.labels to {one_line(order)}."
    )


def _of_numbers(reference: ModelReference, split: str, found: NumberDoubt) -> str:
    fact = (
        f"mean squared error {found.error:.4g} on {split}, where always predicting the mean label "
        f"has {found.error_of_mean:.4g}."
    )
    if reference.trained:
        return fact
    fix = (
        "Fine-tune it on this task first, or give its numbers on the labels' scale in a file "
        f"(teachers.{reference.name}.predictions)."
    )
    if reference.predictions is None:
        config = load_config(reference.model, reference.revision)
        key, function = output_function(config)
        if function is not None:
            return (
                f"{fact} Its config.json has {key}={function}, which sentence-transformers puts "
                f"behind its output: here it is what the model computes before that. {fix}"
            )
    return f"{fact} Its numbers may be on another scale than the labels. {fix}"
