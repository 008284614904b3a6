"""The index from content keys to record indices: 20 bytes per example, memory-mapped, searched by
bisection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ds_distill.cache.format import damaged
from ds_distill.errors import UserError
from ds_distill.files import checksum, new_file
from ds_distill.keys import find_keys

SCHEMA = pa.schema([("key_hi", pa.int64()), ("key_lo", pa.int64()), ("row", pa.uint32())])


def write_index(file: Path, keys: np.ndarray, indices: np.ndarray) -> None:
    """Write an index of distinct keys. keys: int64 [N, 2]; indices: uint32 [N].

    Arrow IPC stream of one record batch, sorted by key. Synced; no manifest refers to it yet.
    """
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    columns = [pa.array(column[order]) for column in (keys[:, 0], keys[:, 1], indices)]
    del order
    with (
        new_file(file) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_stream(sink, SCHEMA) as stream,
    ):
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


class KeyIndex:
    """An index file, memory-mapped."""

    def __init__(self, cache: Path, name: str, written: str) -> None:
        """written: the file's checksum then.

        Raises UserError when the file is missing or damaged, OSError when it cannot be read.
        """
        self._cache = cache
        file = cache / name
        if not file.is_file() or checksum(file) != written:
            raise damaged(cache, name)
        with pa.memory_map(str(file)) as source:
            [batch] = list(pa.ipc.open_stream(source))
        self._hi, self._lo, self._rows = (column.to_numpy() for column in batch.columns)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> np.ndarray:
        """All keys, sorted: int64 [N, 2]."""
        return np.stack([self._hi, self._lo], axis=1)

    @property
    def all_indices(self) -> np.ndarray:
        """The record indices of `keys`: uint32 [N]."""
        return self._rows

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Record indices of keys, -1 where a key is missing: int64 [B, 2] -> int64 [B]."""
        positions = find_keys(self._hi, self._lo, keys)
        if not len(self):
            return positions
        return np.where(positions < 0, -1, self._rows[positions].astype(np.int64))

    def indices(self, keys: torch.Tensor) -> np.ndarray:
        """Record indices of keys: int64 [B, 2] -> int64 [B].

        Raises UserError when a key is missing.
        """
        wanted = keys.numpy()
        indices = self.find(wanted)
        missing = wanted[indices < 0]
        if len(missing):
            shown = ", ".join(str(key.tolist()) for key in missing[:3])
            raise UserError(
                f"cache {self._cache}: lacks {len(missing)} of {len(wanted)} examples, e.g. with "
                f"the keys {shown}. The data changed since it was built: build it again, which "
                "adds the missing examples."
            )
        return indices
