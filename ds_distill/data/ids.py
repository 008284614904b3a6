"""The column that names examples: a teacher's file of predictions may say by it what it is of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ds_distill.data.columns import arrow_column
from ds_distill.keys import content_keys, find_keys, sorted_keys

ID = ("id_hi", "id_lo")
"""Columns of a split, int64: the two halves of a hash of the example's id; null without one."""

NAMED = pa.schema([(name, pa.int64()) for name in ID])


def hashed_ids(names: list[str | None]) -> list[pa.Array]:
    """The columns `ID`, of the ids of some examples."""
    keys = content_keys([name or "" for name in names])
    nothing = np.array([name is None for name in names])
    return [pa.array(keys[:, half], mask=nothing) for half in (0, 1)]


@dataclass(frozen=True)
class ExamplesById:
    """M examples by their ids, in ascending order of these."""

    ids: np.ndarray
    """int64 [M, 2]: hashes of the ids, distinct."""
    keys: np.ndarray
    """int64 [M, 2]: content keys."""
    rows: np.ndarray
    """int64 [M]: how many rows an example is: its words, or 1."""

    @staticmethod
    def of(splits: Iterable[datasets.Dataset]) -> ExamplesById:
        """Of splits, those whose examples have ids. Raises UnlikeExamples."""
        parts = [_of_split(data) for data in splits if ID[0] in data.column_names]
        table = np.concatenate([np.zeros((0, 5), dtype=np.int64), *parts])
        order, first = sorted_keys(table[:, :2])
        ordered = table[order]
        same = ordered[first][np.cumsum(first) - 1]
        if (unlike := np.flatnonzero((ordered != same).any(axis=1))).size:
            both = same[unlike[0]], ordered[unlike[0]]
            raise UnlikeExamples({(int(row[2]), int(row[3])) for row in both})
        kept = ordered[first]
        return ExamplesById(kept[:, :2], kept[:, 2:4], kept[:, 4])

    def fingerprint(self) -> str:
        """Of which examples have which ids."""
        table = np.concatenate([self.ids, self.keys, self.rows[:, None]], axis=1)
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(table).tobytes())

    def find(self, names: list[str]) -> np.ndarray:
        """Where examples with these ids stand: int64 [B], -1 of one that does not."""
        return find_keys(self.ids[:, 0], self.ids[:, 1], content_keys(names))


class UnlikeExamples(Exception):
    """Two examples that are not the same have one id."""

    def __init__(self, keys: set[tuple[int, int]]) -> None:
        """keys: their content keys."""
        super().__init__(keys)
        self.keys = keys


def _of_split(data: datasets.Dataset) -> np.ndarray:
    """int64 [n, 5]: id, key and number of rows, of those of its examples that have an id."""
    there = arrow_column(data, ID[0]).is_valid()
    columns = [
        arrow_column(data, name).filter(there).to_numpy() for name in (*ID, "key_hi", "key_lo")
    ]
    known = there.to_numpy()
    rows = np.ones(len(data), dtype=np.int64)
    if "words" in data.column_names:
        rows = pc.list_value_length(arrow_column(data, "words")).to_numpy()
    return np.stack([*columns, rows[known]], axis=1).astype(np.int64)
