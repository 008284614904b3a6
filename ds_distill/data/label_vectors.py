"""Vectors of 0 and 1 for each label, as transformers' loss for any number of labels takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeGuard

import pyarrow as pa

from ds_distill.data.readers import Reader


def vector_length(reader: Reader, column: str) -> int | None:
    """The length of a column's lists where they are vectors: all of one length, of two or more.
    None where they are not.

    Where two labels are known, [0, 1] may be both, by their ids; but not in every row.
    """
    length = None
    for value in _lists(reader, column):
        if value is None:
            continue
        if not is_vector(value, length):
            return None
        length = len(value)
    return length


def _lists(reader: Reader, column: str) -> Iterator[object]:
    """What each row has in a column of lists; from the start again where something is odd."""
    try:
        for table in reader.tables([column]):
            yield from (as_list(value, reader) for value in table[column].to_pylist())
    except (KeyError, pa.ArrowException, OSError, ValueError):
        yield from (as_list(row.get(column), reader) for _, row in reader.rows([column]))


def as_list(value: object, reader: Reader) -> object:
    """A row's list of labels; in CSV, of their JSON."""
    if not (reader.numbers_are_text and isinstance(value, str)):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    return value or None


def is_vector(value: object, length: int | None) -> TypeGuard[list[Any]]:
    """Whether a list is of 0 and 1 alone, also as 1.0 or true. length: None: of any, but one."""
    return (
        isinstance(value, list)
        and len(value) == (max(len(value), 2) if length is None else length)
        and all(one in (0, 1) for one in value)
    )
