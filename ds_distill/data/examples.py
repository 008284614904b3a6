"""Convert a reader's rows to a file of validated examples.

The fast path takes whole Arrow batches. When anything is unusual, the rows are read again one by
one, which finds the first mistake and its location. So all messages come from one path, and correct
files do not pay for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock

from ds_distill.data.keys import content_keys, hash_keys
from ds_distill.data.readers import BATCH, Reader, kind_of
from ds_distill.errors import UserError, did_you_mean
from ds_distill.files import new_file
from ds_distill.parts.data import Columns

EXAMPLES = pa.schema(
    [
        ("text", pa.string()),
        ("label", pa.int64()),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
    ]
)
"""Columns of converted examples; pairs have `text_b` after `text`."""

_KEEP_PER_CLASS = 0x6B656570  # stream of hash_keys: which examples a cap keeps
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)")


class _Odd(Exception):
    """The fast path found something that the exact path has to examine."""


def convert(reader: Reader, columns: Columns, labels: list[str], path: Path) -> None:
    """Write a reader's rows as examples to an Arrow stream file.

    Columns: those of EXAMPLES. `label` is the position in `labels`, and -1 in all rows when no
    row has a label (or `labels` is empty: the split has no such column).

    Raises UserError with the location of the first invalid row.
    """
    names = [columns.text] + ([columns.text_b] if columns.text_b is not None else [])
    ids = LabelIds(labels, reader, columns.label) if labels else None
    try:
        count = write_examples(path, names, _fast_batches(reader, names, columns.label, ids))
    except (_Odd, pa.ArrowException, OSError, ValueError):
        count = write_examples(path, names, _exact_batches(reader, names, columns.label, ids))
    if count == 0:
        raise UserError(f"{reader.name}: no rows. Put at least one example there.")


def distinct_labels(reader: Reader, column: str) -> list[str]:
    """Names of the labels in a column, sorted; as numbers where all are whole numbers.

    Raises UserError when a row cannot be read or its label is neither text nor a whole number.
    """
    found: set[Any] = set()
    try:
        for table in reader.tables([column]):
            values = _plain(table[column])
            if pa.types.is_boolean(values.type):
                values = values.cast(pa.string())
            if not (_is_text(values.type) or pa.types.is_integer(values.type)):
                raise _Odd
            found.update(pc.unique(values).to_pylist())
    except (_Odd, pa.ArrowException, OSError, ValueError):
        found = set()
        for location, row in reader.rows([column]):
            value = _name_if_bool(row.get(column))
            if value is not None and type(value) not in (str, int):
                raise UserError(_not_a_label(location, column, value)) from None
            found.add(value)
    found -= {None, ""} if reader.numbers_are_text else {None}
    names = {str(value) for value in found} if found != {-1} else set()
    if all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


def keep_per_class(classes: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Positions of `count` examples of each class (all, where there are fewer), ascending.

    classes: int64 [N]. keys: int64 [N, 2], content keys. Those with the smallest hashes are
    chosen, so the choice does not depend on the order, and a smaller count gives a subset of a
    larger one.
    """
    hashes = hash_keys(keys, _KEEP_PER_CLASS)
    order = np.lexsort((hashes, classes))
    ordered = classes[order]
    starts = np.searchsorted(ordered, ordered)  # the first position of each example's class
    return np.sort(order[np.arange(len(order)) - starts < count])


def build_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Create a file with `write(temporary path)` unless it exists; returns `target`.

    Of several processes one writes and the others wait. The file appears complete or not at all.

    Raises UserError when the folder cannot be written or its disk is full.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                with new_file(target) as temporary:
                    write(temporary)
    except OSError as error:
        raise UserError(
            f"{target.parent}: converted data cannot be written here: "
            f"{error.strerror or error}. Free some space, or set HF_DATASETS_CACHE to a folder "
            "that can be written."
        ) from error
    return target


class LabelIds:
    """Maps labels of a file, names or whole numbers, to class ids. true and false are names.

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
        """Class ids, int64 [N], -1 for no label. Raises _Odd where a label is not known."""
        values = _plain(values)
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.string())
        if _is_text(values.type):
            known: dict[Any, int] = self.names
        elif pa.types.is_integer(values.type):
            known, values = self.numbers, values.cast(pa.int64())
        elif pa.types.is_null(values.type):
            return np.full(len(values), -1, dtype=np.int64)
        else:
            raise _Odd
        locations = pc.index_in(values, value_set=pa.array(list(known), type=values.type))
        if locations.null_count != values.null_count:
            raise _Odd
        ids = np.array([*known.values(), -1], dtype=np.int64)
        return ids[pc.fill_null(locations, len(known)).to_numpy()]

    def of_value(self, value: object, location: str) -> int:
        """Class id of one label, -1 for no label. Raises UserError where it is not known."""
        value = _name_if_bool(value)
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
        numbers = "" if type(value) is str else f" Class ids go from 0 to {len(self.labels) - 1}."
        raise UserError(
            f"{location}: label {given} (column {self.column!r}) is not one of the "
            f"{len(self.labels)} labels: {shown}.{did_you_mean(str(value), self.labels)}{numbers} "
            "Correct the row, or list all labels in their order with task.labels=[A, B]."
        )


def _fast_batches(
    reader: Reader, names: list[str], label: str, ids: LabelIds | None
) -> Iterator[tuple[list[pa.ChunkedArray], np.ndarray]]:
    """(text columns, class ids) in batches. Raises _Odd, ArrowException, OSError, ValueError."""
    labelled: set[bool] = set()
    for table in reader.tables([*names, label] if ids else names):
        table.validate(full=True)  # Arrow silently reads JSON that is not UTF-8
        texts = [_plain(table[name]) for name in names]
        if any(not _is_text(column.type) or column.null_count for column in texts):
            raise _Odd
        if ids is None:
            classes = np.full(len(table), -1, dtype=np.int64)
        else:
            if label not in table.column_names:
                raise _Odd
            classes = ids.of_column(table[label])
            labelled.update(np.unique(classes >= 0).tolist())
            if len(labelled) > 1:
                raise _Odd
        yield [column.cast(pa.string()) for column in texts], classes


def _exact_batches(
    reader: Reader, names: list[str], label: str, ids: LabelIds | None
) -> Iterator[tuple[list[pa.ChunkedArray], np.ndarray]]:
    """The same, row by row. Raises UserError with the location of the first mistake."""
    first: dict[bool, str] = {}  # has a label or not -> location of the first such row

    def checked() -> Iterator[tuple[list[str], int]]:
        for location, row in reader.rows([*names, label] if ids else names):
            texts = [_text(row, name, location) for name in names]
            number = -1 if ids is None else ids.of_value(row.get(label), location)
            first.setdefault(number >= 0, location)
            if len(first) > 1:
                raise UserError(
                    f"{first[False]}: no label in {label!r}, but {first[True]} has one. Give "
                    "every row of a split a label, or none."
                )
            yield texts, number

    rows = checked()
    while batch := list(islice(rows, BATCH)):
        columns = zip(*(texts for texts, _ in batch), strict=True)
        texts = [pa.chunked_array([pa.array(column, pa.string())]) for column in columns]
        yield texts, np.array([number for _, number in batch], dtype=np.int64)


def write_examples(
    path: Path,
    names: list[str],
    batches: Iterable[tuple[list[pa.ChunkedArray], np.ndarray]],
) -> int:
    """Write examples to an Arrow stream file. Returns their number.

    names: of the text columns, one or two. batches: these columns and the class ids, int64.
    """
    schema = EXAMPLES
    if len(names) > 1:
        schema = schema.insert(1, pa.field("text_b", pa.string()))
    count = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for texts, classes in batches:
            keys = content_keys(*(column.to_pylist() for column in texts))
            table = pa.table([*texts, classes, keys[:, 0], keys[:, 1]], schema=schema)
            writer.write_table(table, max_chunksize=BATCH)
            count += len(table)
    return count


def _text(row: dict[str, Any], name: str, location: str) -> str:
    if name not in row:
        present = ", ".join(map(repr, row)) or "nothing"
        raise UserError(
            f"{location}: no {name!r}; it has {present}."
            f"{did_you_mean(name, row)} Every row needs it."
        )
    value = row[name]
    if not isinstance(value, str):
        raise UserError(
            f"{location}: {name!r} must be a text, got {kind_of(value)}. Write the text in quotes, "
            "or take the row out."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location}: {name!r} holds half of a surrogate pair ({value[error.start]!r}), which "
            "is no character. Correct the text or take the row out."
        ) from error
    return value


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without dictionary encoding."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


def _name_if_bool(value: object) -> object:
    """The name of a label that is true or false, as JSON writes it; other values as they are."""
    return str(value).lower() if isinstance(value, bool) else value


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _not_a_label(location: str, column: str, value: object) -> str:
    return (
        f"{location}: the label (column {column!r}) must be a name or a whole number, got "
        f"{kind_of(value)}. Write the label's name in quotes."
    )
