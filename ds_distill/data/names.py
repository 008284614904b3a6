"""What the data name beside an example: the group that it belongs to, the teacher that the routing
policy `column` follows, and an id, by which a teacher's file of predictions may say what it is of.
"""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ds_distill.data.columns import arrow_column
from ds_distill.data.groups import hashed_groups
from ds_distill.keys import content_keys, name_id

TEACHER = "teacher"
"""Column of a split, str: the teacher's name; null where none is named."""

ID = ("id_hi", "id_lo")
"""Columns of a split, int64: the two halves of a hash of the example's id; null without one."""

NAMED = {"group": ("group",), "teacher": (TEACHER,), "id": ID}
"""By key of `task.data.columns`: the columns that are made of the names that stand there."""


def named_columns(key: str, names: list[str | None]) -> list[pa.Array]:
    """The columns `NAMED` of a key, of the names of some examples, None where one has none."""
    if key == "teacher":
        return [pa.array(names, pa.string())]
    keys = content_keys([name or "" for name in names])
    columns = [hashed_groups(keys)] if key == "group" else [keys[:, 0], keys[:, 1]]
    nothing = np.array([name is None for name in names])
    return [pa.array(column, mask=nothing) for column in columns]


def teacher_names(split: datasets.Dataset) -> tuple[list[str], np.ndarray] | None:
    """The names that stand in a split, and of each of its N examples the number of its name, int64
    [N], -1 where none is named. None where the split has no such column."""
    if TEACHER not in split.column_names:
        return None
    column = arrow_column(split, TEACHER)
    encoded = pc.dictionary_encode(column.combine_chunks())
    numbers = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), numbers.astype(np.int64)


def teacher_ids(split: datasets.Dataset) -> np.ndarray | None:
    """The `name_id` of the teacher of each example, 0 where none is named: int64 [N]. None where
    the split has no such column."""
    named = teacher_names(split)
    if named is None:
        return None
    names, numbers = named
    return np.array([*map(name_id, names), 0], dtype=np.int64)[numbers]
