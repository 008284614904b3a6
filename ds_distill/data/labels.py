"""Labels of a file as class ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ds_distill.data.readers import Reader, kind_of
from ds_distill.errors import UserError, did_you_mean
from ds_distill.files import read_json

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)")


class Odd(Exception):
    """The fast path found something that the exact path has to examine."""


def is_labelled(labels: np.ndarray) -> np.ndarray:
    """Whether each example has labels: bool [N].

    labels: int64 [N], the class id; or [N, L], of each label whether the example has it. -1 where
        it has none. Or float32 [N], the number, NaN where it has none.
    """
    if labels.dtype.kind == "f":
        return ~np.isnan(labels)
    known = labels.reshape(len(labels), -1) >= 0
    return np.asarray(known.all(axis=1))


def distinct_labels(reader: Reader, column: str) -> list[str]:
    """Names of the labels in a column, of each or of lists of them, sorted; as numbers where all
    are whole numbers.

    Raises UserError when a row cannot be read or its label is neither text nor a whole number.
    """
    found: set[Any] = set()
    try:
        for table in reader.tables([column]):
            values = plain(table[column])
            if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
                values = pc.list_flatten(values)
            values = _as_labels(values)
            if not (is_text(values.type) or pa.types.is_integer(values.type)):
                raise Odd
            found.update(pc.unique(values).to_pylist())
    except (Odd, pa.ArrowException, OSError, ValueError):
        found = set()
        for location, row in reader.rows([column]):
            given = row.get(column)
            for value in map(_as_label, given if isinstance(given, list) else [given]):
                if value is not None and type(value) not in (str, int):
                    raise UserError(_not_a_label(location, column, value)) from None
                found.add(value)
    found -= {None, ""} if reader.numbers_are_text else {None}
    names = {str(value) for value in found} if found != {-1} else set()
    if all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


class LabelIds:
    """Maps labels of a file, names or whole numbers, to class ids. true and false are names, and
    1.0 is 1, except in CSV, which has text alone.

    A number is a class id, except where names are numbers themselves: then it is a name. Where
    the format has names for its class ids, these count. -1, null, and in CSV an empty field mean
    no label.
    """

    def __init__(self, labels: list[str], reader: Reader, column: str) -> None:
        self.labels = labels
        self.column = column
        self.names = {name: number for number, name in enumerate(labels)}
        self.class_names = reader.label_names(column)
        if self.class_names is not None:
            self.numbers = {
                number: self.names[name]
                for number, name in enumerate(self.class_names)
                if name in self.names
            }
        elif any(map(_WHOLE_NUMBER.fullmatch, labels)):
            whole = [name for name in labels if _WHOLE_NUMBER.fullmatch(name)]
            self.numbers = {int(name): self.names[name] for name in whole}
        else:
            self.numbers = {number: number for number in range(len(labels))}
        self.numbers.setdefault(-1, -1)
        if reader.numbers_are_text:
            for number, label in self.numbers.items():
                self.names.setdefault(str(number), label)
            self.names.setdefault("", -1)

    def of_column(self, values: pa.ChunkedArray) -> np.ndarray:
        """Class ids, int64 [N], -1 for no label. Raises Odd, or ArrowException, where a label is
        not known."""
        values = _as_labels(plain(values))
        if is_text(values.type):
            known: dict[Any, int] = self.names
        elif pa.types.is_integer(values.type):
            known, values = self.numbers, values.cast(pa.int64())
        elif pa.types.is_null(values.type):
            return np.full(len(values), -1, dtype=np.int64)
        else:
            raise Odd
        locations = pc.index_in(values, value_set=pa.array(list(known), type=values.type))
        if locations.null_count != values.null_count:
            raise Odd
        ids = np.array([*known.values(), -1], dtype=np.int64)
        return ids[pc.fill_null(locations, len(known)).to_numpy()]

    def of_value(self, value: object, location: str) -> int:
        """Class id of one label, -1 for no label. Raises UserError where it is not known."""
        value = _as_label(value)
        if value is None:
            return -1
        if type(value) is str and value in self.names:
            return self.names[value]
        if type(value) is int and value in self.numbers:
            return self.numbers[value]
        if type(value) not in (str, int):
            raise UserError(_not_a_label(location, self.column, value))
        given = repr(value)
        if type(value) is int and self.class_names and 0 <= value < len(self.class_names):
            given = f"{value} ({self.class_names[value]!r})"
        shown = ", ".join(self.labels[:20]) + (", ..." if len(self.labels) > 20 else "")
        are_ids = type(value) is int and not any(map(_WHOLE_NUMBER.fullmatch, self.labels))
        numbers = f" Class ids go from 0 to {len(self.labels) - 1}." if are_ids else ""
        raise UserError(
            f"{location}: label {given} (column {self.column!r}) is not one of the "
            f"{len(self.labels)} labels: {shown}.{did_you_mean(str(value), self.labels)}{numbers} "
            "Correct the row, or list all labels in their order with task.labels=[A, B]."
        )


class LabelSets:
    """Maps lists of labels, names or whole numbers, to 0 or 1 for each label. null means that a
    row's labels are not known, an empty list that it has none of them."""

    def __init__(self, labels: list[str], reader: Reader, column: str) -> None:
        self._one = LabelIds(labels, reader, column)
        self._count, self._column = len(labels), column

    def of_column(self, values: pa.ChunkedArray) -> np.ndarray:
        """int64 [N, L], -1 in rows without labels. Raises Odd where a label is not known."""
        if pa.types.is_null(values.type):
            return np.full((len(values), self._count), -1, dtype=np.int64)
        if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
            raise Odd
        found = [np.zeros((0, self._count), dtype=np.int64)]
        for chunk in values.chunks:
            ids = self._one.of_column(pa.chunked_array([chunk.flatten()]))
            if (ids < 0).any():
                raise Odd
            lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy()
            has = np.zeros((len(chunk), self._count), dtype=np.int64)
            has[np.repeat(np.arange(len(chunk)), lengths), ids] = 1
            has[chunk.is_null().to_numpy(zero_copy_only=False)] = -1
            found.append(has)
        return np.concatenate(found)

    def of_value(self, value: object, location: str) -> np.ndarray:
        """int64 [L]. Raises UserError where a label is not known, or it is no list."""
        has = np.full(self._count, -1, dtype=np.int64)
        if value is None:
            return has
        if not isinstance(value, list):
            raise UserError(
                f"{location}: the labels (column {self._column!r}) must be a list of names or "
                f"whole numbers, got {kind_of(value)}. Write [] where none applies, and null where "
                "they are not known."
            )
        has[:] = 0
        for label in value:
            number = self._one.of_value(label, location)
            if number < 0:
                raise UserError(
                    f"{location}: a label (column {self._column!r}) is {label!r}. Take it out of "
                    "the list."
                )
            has[number] = 1
        return has


class Numbers:
    """Reads labels that are finite numbers. null, and in CSV an empty field, mean no label."""

    def __init__(self, reader: Reader, column: str) -> None:
        self._column, self._from_text = column, reader.numbers_are_text

    def of_column(self, values: pa.ChunkedArray) -> np.ndarray:
        """float32 [N], NaN for no label. Raises Odd, or ArrowException, where one is no number."""
        values = plain(values)
        if self._from_text and is_text(values.type):
            values = pc.if_else(pc.equal(values, ""), pa.scalar(None, values.type), values)
        elif not (
            pa.types.is_integer(values.type)
            or pa.types.is_floating(values.type)
            or pa.types.is_null(values.type)
        ):
            raise Odd
        with np.errstate(over="ignore"):  # it is refused
            numbers = values.cast(pa.float64()).to_numpy().astype(np.float32)
        if not np.isfinite(numbers[values.is_valid().to_numpy()]).all():
            raise Odd
        return np.asarray(numbers)

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
                f"{location}: the label (column {self._column!r}) must be a finite number, got "
                f"{kind_of(value)}. Write a number such as 0.5, without quotes in JSON, or choose "
                "the right column with task.data.columns.label=NAME."
            )
        return number


def label_array(labels: np.ndarray) -> pa.Array:
    """int64 or float32 [N] as it is; [N, L] as lists of int8."""
    if labels.ndim == 1:
        return pa.array(labels)
    flat = pa.array(labels.astype(np.int8).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, labels.shape[1])


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without dictionary encoding."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


def is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _as_labels(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """As `_as_label`, of a column. Raises ArrowException where a number is not whole."""
    if pa.types.is_boolean(labels.type):
        return labels.cast(pa.string())
    return labels.cast(pa.int64()) if pa.types.is_floating(labels.type) else labels


def _as_label(value: object) -> object:
    """The name of a label that is true or false, as JSON writes it; 1.0, as pandas has whole
    numbers where rows lack one, as 1; other values as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value).lower() if isinstance(value, bool) else value


def _not_a_label(location: str, column: str, value: object) -> str:
    are_numbers = isinstance(value, float)
    numbers = ", or take task.type=regression where numbers are predicted" if are_numbers else ""
    return (
        f"{location}: the label (column {column!r}) must be a name or a whole number, got "
        f"{kind_of(value)}. Write the label's name in quotes{numbers}."
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
