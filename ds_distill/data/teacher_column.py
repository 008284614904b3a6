"""The teacher that the data name for an example, which the routing policy `column` follows."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ds_distill.data.columns import arrow_column
from ds_distill.keys import name_id

TEACHER = "teacher"
"""Column of a split, str: the teacher's name; null where none is named."""

NAMED = pa.schema([(TEACHER, pa.string())])


def named_teachers(names: list[str | None]) -> list[pa.Array]:
    """The column `NAMED`, of the names of some examples."""
    return [pa.array(names, pa.string())]


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
