"""Labels of a file as class ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from ds_distill.data.readers.base import Reader, kind_of
from ds_distill.errors import UserError, did_you_mean
from ds_distill.files import read_json
from ds_distill.recipe.tasks import Task, key_of, labels_named

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMERAL = re.compile(r"([-+]?[0-9]{1,18})(\.0*)?")
"""A whole number, in all its spellings."""


def is_labelled(labels: np.ndarray) -> np.ndarray:
    """Whether each example has labels: bool [N].

    labels: int64 [N], the class id; or [N, L], of each label whether the example has it. -1 where
        it has none. Or float32 [N], the number, NaN where it has none.
    """
    if labels.dtype.kind == "f":
        return ~np.isnan(labels)
    has = labels >= 0
    return has if has.ndim == 1 else np.asarray(has.all(axis=1))


def distinct_labels(
    task: Task, reader: Reader, column: str, *, minus_one: bool = False
) -> list[str]:
    """Names of the labels in a column, sorted; as numbers where all are whole numbers. A number of
    several spellings is named by its value, and so is 1.0 where all are whole. Where rows have
    vectors of labels, these are named by their places, from 0.

    minus_one: -1 is a name, and not the mark of a row without a label.

    Raises UserError when a row cannot be read or its label is neither text nor a whole number.
    """
    many = task.many_labels
    if many and (length := vector_length(reader, column)) is not None:
        return list(map(str, range(length)))
    names: set[str] = set()
    for location, row in reader.rows([column]):
        value = row.get(column)
        if many:
            value = as_list(value, reader)
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                name = _spelled(one)
                if name is None:
                    raise _not_a_label(task, column, one, location)
                names.add(name)
    spellings: dict[str | int, list[str]] = {}
    for name in names - ({""} if reader.numbers_are_text else set()):
        spellings.setdefault(_key(name), []).append(name)
    if not minus_one:
        spellings.pop(-1, None)
    whole = all(isinstance(key, int) for key in spellings)
    labels = [
        str(key) if len(alike) > 1 or (whole and "." in alike[0]) else alike[0]
        for key, alike in spellings.items()
    ]
    return sorted(labels, key=int if all(map(_WHOLE_NUMBER.fullmatch, labels)) else str)


class LabelNames:
    """Finds labels by their names. White space around a name does not count, and whole numbers
    compare by value: 01 and 1.0 are 1. Of labels that are alike then, the same spelling is meant.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._exact = {name: number for number, name in enumerate(labels)}
        self._by_key: dict[str | int, int] = {}
        for name in sorted(labels, key=lambda name: str(_key(name)) != name):
            self._by_key.setdefault(_key(name.strip()), self._exact[name])
        self.any_numbers = any(isinstance(key, int) for key in self._by_key)

    def find(self, name: str) -> int | None:
        exact = self._exact.get(name)
        return self._by_key.get(_key(name.strip())) if exact is None else exact


class LabelIds:
    """Maps labels of a file, names or whole numbers, to class ids. true and false are names, and
    1.0 is 1; see `LabelNames`.

    A number is a class id, except where names are numbers themselves: then it is a name. Where
    the format has names for its class ids, these count. -1, null, and in CSV an empty field mean
    no label.
    """

    type: pa.DataType = pa.int64()
    """Of a column of them."""

    def __init__(
        self, task: Task, labels: list[str], reader: Reader, column: str, *, unordered: bool = False
    ) -> None:
        """unordered: the labels are those of examples, whose order says of no number which is
        meant."""
        self.task, self.labels, self.column = task, labels, column
        self._names, self._from_text = LabelNames(labels), reader.numbers_are_text
        self.class_names = reader.label_names(column)
        self._ids: dict[str | int, int] = {}
        if self.class_names is not None:
            ids = enumerate(map(self._names.find, self.class_names))
            self._ids = {number: label for number, label in ids if label is not None}
        elif not (unordered or self._names.any_numbers):
            self._ids = {number: number for number in range(len(labels))}
        self._find_again = lru_cache(typed=True)(self._find)  # the labels of many rows are few

    def of_value(self, value: object, location: str) -> int:
        """Class id of one label, -1 for no label. Raises UserError where it is not known."""
        try:
            label = self._find_again(value)
        except TypeError:  # of a list or an object
            label = None
        if label is not None:
            return label
        name = _spelled(value)
        if name is None:
            raise _not_a_label(self.task, self.column, value, location)
        text, is_number = repr(value) if isinstance(value, str) else name, _is_number(value)
        if is_number and self.class_names and 0 <= int(name) < len(self.class_names):
            text = f"{name} ({self.class_names[int(name)]!r})"
        shown = ", ".join(self.labels[:20]) + (", ..." if len(self.labels) > 20 else "")
        numbers = ""
        if is_number and self._ids:
            numbers = f" Class ids go from 0 to {len(self.class_names or self.labels) - 1}."
        elif isinstance(_key(name), int) and not self._names.any_numbers:
            numbers = " They are names in train, whose order gives no number a meaning."
        raise UserError(
            f"label {text} (column {self.column!r}) is not one of the "
            f"{len(self.labels)} labels: {shown}.{did_you_mean(name, self.labels)}{numbers} "
            f"Correct the row, or list all labels in their order with {labels_named(self.task)}.",
            at=location,
        )

    def _find(self, value: object) -> int | None:
        """The class id, -1 for no label, None where it is not known."""
        if value is None:
            return -1
        if (name := _spelled(value)) is None:
            return None
        is_number = _is_number(value)
        if not (is_number and self.class_names):
            label = self._names.find(value if isinstance(value, str) else name)
            if label is not None:
                return label
        key = _key(name)
        if key == -1 or (self._from_text and name == ""):
            return -1
        return self._ids.get(key) if is_number or self._from_text else None


class LabelSets:
    """Maps lists of labels, names or whole numbers, to 0 or 1 for each label; in CSV, their JSON.
    Lists of 0 or 1 for each label are taken as they are, where all rows have them: see
    `vector_length`. null means that a row's labels are not known, an empty list that it has none
    of them."""

    def __init__(
        self, task: Task, labels: list[str], reader: Reader, column: str, *, unordered: bool = False
    ) -> None:
        """unordered: as of `LabelIds`."""
        self._one = LabelIds(task, labels, reader, column, unordered=unordered)
        self._count, self._reader, self._column = len(labels), reader, column
        self._length = len(self._one.class_names or labels)
        self.type = pa.list_(pa.int8(), self._count)

    @cached_property
    def _are_vectors(self) -> bool:
        return vector_length(self._reader, self._column) == self._length

    def of_value(self, value: object, location: str) -> np.ndarray:
        """int64 [L]. Raises UserError where a label is not known or stands twice, or it is no
        list."""
        value = as_list(value, self._reader)
        if value is None:
            return np.full(self._count, -1, dtype=np.int64)
        if not isinstance(value, list):
            raise UserError(
                f"{location}: the labels (column {self._column!r}) must be a list of names or "
                f"whole numbers, got {kind_of(value)}. Write [] where none applies, and null where "
                'they are not known; in CSV, lists as in JSON: ["a", "b"].'
            )
        if self._are_vectors:
            value = [position for position, one in enumerate(value) if one]
        named = not self._are_vectors or self._one.class_names is not None
        numbers: list[int] = []
        for label in value:
            number = self._one.of_value(label, location) if named else label
            if number < 0:
                raise UserError(
                    f"{location}: a label (column {self._column!r}) is {label!r}. Take it out of "
                    "the list."
                )
            if number in numbers:
                raise self._stands_twice(label, location)
            numbers.append(number)
        has = np.zeros(self._count, dtype=np.int64)
        has[numbers] = 1
        return has

    def _stands_twice(self, label: object, location: str) -> UserError:
        twice = f"{location}: the labels (column {self._column!r}) have {label!r} twice. "
        if isinstance(label, str):
            return UserError(f"{twice}Name each once.")
        rows = self._reader.rows([self._column])
        lists = ((where, as_list(row.get(self._column), self._reader)) for where, row in rows)
        other = (at for at, row in lists if row is not None and not _is_vector(row, self._length))
        return UserError(
            f"{twice}Name each once; or, of vectors, write 0 or 1 for each of the {self._length} "
            f"labels in every row, and {next(other)} has something else."
        )


class Numbers:
    """Reads labels that are finite numbers. null, and in CSV an empty field, mean no label."""

    type: pa.DataType = pa.float32()

    def __init__(self, task: Task, reader: Reader, column: str) -> None:
        self._task, self._column, self._from_text = task, column, reader.numbers_are_text

    def of_value(self, value: object, location: str) -> np.float32:
        """NaN for no label. Raises UserError where it is no number, or none that is finite."""
        if value is None or (self._from_text and value == ""):
            return np.float32(np.nan)
        try:
            written = self._from_text and isinstance(value, str) and "_" not in value
            if not written and type(value) not in (int, float):
                raise ValueError
            with np.errstate(over="ignore"):
                number = np.float32(float(value))  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            number = np.float32(np.nan)
        if not np.isfinite(number):
            raise UserError(
                f"the label (column {self._column!r}) must be a finite number, got "
                f"{kind_of(value)}. Write a number such as 0.5, without quotes in JSON, or choose "
                f"the right column with {key_of(self._task, 'data.columns.label')}=NAME.",
                at=location,
            )
        return number


def label_array(labels: np.ndarray) -> pa.Array:
    """int64 or float32 [N] as it is; [N, L] as lists of int8."""
    if labels.ndim == 1:
        return pa.array(labels)
    flat = pa.array(labels.astype(np.int8).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, labels.shape[1])


def vector_length(reader: Reader, column: str) -> int | None:
    """The length of a column's lists where they are vectors of 0 and 1 for each label, as
    transformers' loss takes them: all of one length, of two or more. None where they are not.

    Where two labels are known, [0, 1] may be both, by their ids; but not in every row.
    """
    length = None
    for _, row in reader.rows([column]):
        value = as_list(row.get(column), reader)
        if value is None:
            continue
        if not _is_vector(value, length):
            return None
        length = len(value)
    return length


def as_list(value: object, reader: Reader) -> object:
    """A row's list of labels; in CSV, of their JSON."""
    if not (reader.numbers_are_text and isinstance(value, str)):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    return value or None


def _is_vector(value: object, length: int | None) -> TypeGuard[list[Any]]:
    """Whether a list is of 0 and 1 alone, also as 1.0 or true. length: None: of any, but one."""
    return (
        isinstance(value, list)
        and len(value) == (max(len(value), 2) if length is None else length)
        and all(one in (0, 1) for one in value)
    )


def _spelled(value: object) -> str | None:
    """A label as a name: one that is true or false as JSON writes it; 1.0, as pandas has whole
    numbers where rows lack one, as 1. None of what is none."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _key(name: str) -> str | int:
    """What tells labels apart: of whole numbers their value."""
    number = _NUMERAL.fullmatch(name)
    return name if number is None else int(number[1])


def _not_a_label(task: Task, column: str, value: object, location: str) -> UserError:
    numbers = f", or take {key_of(task, 'type')}=regression where numbers are predicted"
    return UserError(
        f"the label (column {column!r}) must be a name or a whole number, got {kind_of(value)}. "
        f"Write the label's name in quotes{numbers if isinstance(value, float) else ''}.",
        at=location,
    )


def read_labels(path: Path) -> list[str]:
    """The names in a labels.json. Raises UserError where it is no list of two names or more."""
    try:
        labels = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = "brackets too deep in each other" if isinstance(error, RecursionError) else error
        raise UserError(
            f"{path}: not readable as JSON: {reason}. Write a list of names."
        ) from error
    names = labels if isinstance(labels, list) else []
    if len(names) < 2 or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise UserError(
            f"{path}: must be a list of two or more different label names in the order of the "
            f'class ids, e.g. ["no", "yes"]; got {str(labels)[:100]}.'
        )
    return names
