"""Map the outputs of a teacher to the task's labels."""

from __future__ import annotations

from collections.abc import Mapping

import yaml
from transformers import PreTrainedConfig

from ds_distill.errors import UserError


def class_names(config: PreTrainedConfig) -> list[str]:
    """A classifier's class names from its configuration, in the order of its outputs."""
    return [str(config.id2label[number]) for number in sorted(config.id2label)]


def are_generic(names: list[str]) -> bool:
    """Whether these are transformers' default names, LABEL_0, LABEL_1, ..."""
    return all(name == f"LABEL_{number}" for number, name in enumerate(names))


def as_yaml(given: Mapping[str, str]) -> str:
    """The value of `teachers.NAME.labels` as YAML on one line."""
    line: str = yaml.safe_dump(
        dict(given), default_flow_style=True, sort_keys=False, allow_unicode=True, width=1_000_000
    )
    return line.strip()


def label_columns(
    reference: str,
    config: PreTrainedConfig,
    labels: list[str],
    given: Mapping[str, str] | None = None,
) -> list[int] | None:
    """For each of the task's labels the index of the checkpoint's output. None: the outputs are the
    labels, in the same order.

    given: the recipe's `teachers.NAME.labels`. Without it the checkpoint must have `labels` in this
        order, or as many default names (LABEL_0, LABEL_1, ...).

    Raises UserError otherwise, and where `given` is not one class for each label.
    """
    names = class_names(config)
    if given is None:
        _check_as_it_stands(reference, names, labels)
        return None
    column_of: dict[str, int] = {}  # label -> column
    for key, label in given.items():
        where = f"labels.{key}={label}"
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
        column = names.index(key) if key in names else int(key)
        if label not in labels:
            raise UserError(
                f"{where}: the task has no label {label!r}. Name one of {', '.join(labels)}."
            )
        if label in column_of:
            raise UserError(
                f"{where}: two classes of model {reference!r} ({names[column_of[label]]} and "
                f"{names[column]}) would be {label!r}. Give each label one class."
            )
        if column in column_of.values():
            raise UserError(
                f"{where}: class {names[column]} of model {reference!r} is given twice, by name "
                "and by number. Keep one of them."
            )
        column_of[label] = column
    lacking = [label for label in labels if label not in column_of]
    if lacking:
        raise UserError(
            f"labels: no class of model {reference!r} is given for {', '.join(lacking)}. It has "
            f"{', '.join(names)}: give one of them for each label."
        )
    columns = [column_of[label] for label in labels]
    return None if columns == list(range(len(names))) else columns


def _check_as_it_stands(reference: str, names: list[str], labels: list[str]) -> None:
    if len(names) != len(labels):
        more = (
            " If the task's labels are among them, map them in the teacher's `labels`."
            if len(names) > len(labels)
            else ""
        )
        raise UserError(
            f"model {reference!r} has {len(names)} classes ({', '.join(names)}), but the task has "
            f"{len(labels)} ({', '.join(labels)}). Fine-tune it on this task first, or use a "
            f"teacher of this task.{more}"
        )
    if not are_generic(names) and [n.lower() for n in names] != [each.lower() for each in labels]:
        of_name = {label.lower(): label for label in labels}
        pairs = {name: of_name.get(name.lower(), "?") for name in names}
        raise UserError(
            f"model {reference!r} has its classes in the order {', '.join(names)}, but the task in "
            f"the order {', '.join(labels)}. Map them with labels: {as_yaml(pairs)} "
            "beside the teacher's model, or set task.labels to the model's order and names."
        )
