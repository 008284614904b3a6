"""Map the outputs of a teacher to the task's labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ds_distill.errors import UserError
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import TaskSettings
from ds_distill.recipe.text import one_line


def class_names(config: PreTrainedConfig) -> list[str]:
    """A classifier's class names from its configuration, in the order of its outputs."""
    return [str(config.id2label[number]) for number in sorted(config.id2label)]


def are_generic(names: list[str]) -> bool:
    """Whether these are transformers' default names, LABEL_0, LABEL_1, ..."""
    return all(name == f"LABEL_{number}" for number, name in enumerate(names))


@dataclass(frozen=True)
class LabelMap:
    """Which outputs of a checkpoint stand for which of a task's labels."""

    outputs: tuple[tuple[int, ...], ...]
    """For each of the K labels that the teacher knows, in the task's order: the checkpoint's
    outputs, of which the probabilities add."""
    classes: tuple[int, ...] | None = None
    """The K labels' class ids, ascending; None: all of the task's."""

    @property
    def known(self) -> tuple[int, ...]:
        """The class ids, also where they are all."""
        return tuple(range(len(self.outputs))) if self.classes is None else self.classes

    def to_json(self) -> list[Any]:
        """For the fingerprint of cached signals: [output, ...] by label, a list where there are
        several, null where the teacher does not know the label and others follow."""
        known = dict(zip(self.known, self.outputs, strict=True))
        found = [known.get(label) for label in range(self.known[-1] + 1)]
        return [one and (one[0] if len(one) == 1 else list(one)) for one in found]


def label_map(
    reference: str,
    config: PreTrainedConfig,
    task: TaskSettings,
    labels: list[str],
    given: Mapping[str, str | None] | None = None,
) -> LabelMap | None:
    """Which of the checkpoint's outputs are the task's labels. None: all, in the same order.

    task: where an example has any number of labels each has one output: there is no distribution
        over a part of the labels.
    labels: the task's.
    given: the recipe's `teachers.NAME.labels`. Without it the checkpoint must have `labels` in this
        order, or as many default names (LABEL_0, LABEL_1, ...).

    Raises UserError otherwise, and where `given` names what is not there, or gives fewer than two
    labels a class.
    """
    names, many_labels = class_names(config), task.many_labels
    if given is None:
        _check_as_it_stands(reference, names, labels, many_labels)
        return None
    outputs: dict[int, list[int]] = {}  # class id -> outputs
    columns: dict[int, str] = {}  # output -> what the recipe calls it
    for key, label in given.items():
        where = f"labels.{key}={'null' if label is None else label}"
        column = _output_of(key, names, reference, where)
        if column in columns:
            raise UserError(
                f"{where}: class {names[column]} of model {reference!r} is given twice, by name "
                "and by number. Keep one of them."
            )
        columns[column] = key
        if label is None:
            continue
        if label not in labels:
            raise UserError(
                f"{where}: the task has no label {label!r}. Name one of {', '.join(labels)}, or "
                "null for a class that is none of them."
            )
        outputs.setdefault(labels.index(label), []).append(column)
    _check_enough(reference, names, labels, outputs, many_labels)
    classes = tuple(sorted(outputs))
    found = tuple(tuple(sorted(outputs[label])) for label in classes)
    if found == tuple((number,) for number in range(len(names))) and len(classes) == len(labels):
        return None
    return LabelMap(found, None if len(classes) == len(labels) else classes)


def tag_map(names: list[str], labels: list[str]) -> LabelMap | None:
    """Which outputs of a token classifier of some entity types are the tags of a task of others:
    those of the same name. What is no type of the task is O there; of the task's types that the
    model does not know it says nothing. None: all, in the same order.

    names: of the model's outputs. labels: the task's.
    """
    outputs: dict[int, list[int]] = {}
    for number, name in enumerate(names):
        label = name if name in labels else OUTSIDE
        if label in labels:
            outputs.setdefault(labels.index(label), []).append(number)
    classes = tuple(sorted(outputs))
    found = tuple(tuple(outputs[label]) for label in classes)
    if names == labels:
        return None
    return LabelMap(found, None if len(classes) == len(labels) else classes)


def _output_of(key: str, names: list[str], reference: str, where: str) -> int:
    """The output of a class that is given by its name or number."""
    if key not in names and not (key.isdecimal() and int(key) < len(names)):
        raise UserError(
            f"{where}: model {reference!r} has no class {key!r}. It has {', '.join(names)}: "
            f"use these names, or their numbers from 0 to {len(names) - 1}."
        )
    if names.count(key) > 1:
        raise UserError(
            f"{where}: model {reference!r} has {names.count(key)} classes of that name. Write "
            f"the number of the right one, counted from 0: {', '.join(names)}."
        )
    return names.index(key) if key in names else int(key)


def _check_enough(
    reference: str,
    names: list[str],
    labels: list[str],
    outputs: Mapping[int, list[int]],
    many_labels: bool,
) -> None:
    """Refuse too few labels to distribute a probability over, and what many labels do not allow."""
    lacking = [label for number, label in enumerate(labels) if number not in outputs]
    if len(outputs) < min(2, len(labels)) or (many_labels and lacking):
        rule = "each label" if many_labels else "two labels at least"
        raise UserError(
            f"labels: no class of model {reference!r} is given for {', '.join(lacking)}. It has "
            f"{', '.join(names)}: give a class for {rule}."
            + (" A teacher of some of the labels is for tasks of type single-label." * many_labels)
        )
    for number, columns in outputs.items():
        if many_labels and len(columns) > 1:
            several = " and ".join(names[column] for column in columns)
            raise UserError(
                f"labels: {several} of model {reference!r} would be {labels[number]!r}. Where an "
                "example has any number of labels their probabilities do not add: give each label "
                "one class."
            )


def _check_as_it_stands(
    reference: str, names: list[str], labels: list[str], many_labels: bool
) -> None:
    of_name = {label.lower(): label for label in labels}
    if len(names) != len(labels):
        pairs = {name: of_name.get(name.lower()) for name in names}
        common = [label for label in pairs.values() if label is not None]
        more = " Fine-tune it on this task first, or use a teacher of this task."
        lacking = [label for label in labels if label not in common]
        if len(common) == len(set(common)) > 1 and not (many_labels and lacking):
            whose = f"knows all but {', '.join(lacking)}" if lacking else "knows more than these"
            more = f" If it {whose}, set labels: {one_line(pairs)} beside the teacher's model."
        raise UserError(
            f"model {reference!r} has {len(names)} classes ({', '.join(names)}), but the task has "
            f"{len(labels)} ({', '.join(labels)}).{more}"
        )
    if not are_generic(names) and [n.lower() for n in names] != [each.lower() for each in labels]:
        written = {name: of_name.get(name.lower(), "?") for name in names}
        raise UserError(
            f"model {reference!r} has its classes in the order {', '.join(names)}, but the task in "
            f"the order {', '.join(labels)}. Map them with labels: {one_line(written)} "
            "beside the teacher's model, or set task.labels to the model's order and names."
        )
