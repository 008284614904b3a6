"""The index from content keys to record indices: 20 bytes per example, memory-mapped, searched by
bisection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ds_distill.cache.format import damaged, file_checksum
from ds_distill.errors import UserError
from ds_distill.files import new_file

SCHEMA = pa.schema([("key_hi", pa.int64()), ("key_lo", pa.int64()), ("row", pa.uint32())])

_LARGE_LOOKUP = 10_000
"""Number of keys from which sorting them first is faster: neighbours are then near in memory."""


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

    def __init__(self, cache: Path, name: str, checksum: str) -> None:
        """Raises UserError when the file is missing or damaged, OSError when it cannot be read."""
        self._cache = cache
        file = cache / name
        if not file.is_file() or file_checksum(file) != checksum:
            raise damaged(cache, name)
        mapped = pa.memory_map(
            str(file)
        )  # outside the try: an error of the system does not mean damage
        try:
            with mapped as source:
                [batch] = list(pa.ipc.open_stream(source))
            batch.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, EOFError) as error:
            raise damaged(cache, name) from error
        if batch.schema != SCHEMA or any(column.null_count for column in batch.columns):
            raise damaged(cache, name)
        self._hi, self._lo, self._indices = (column.to_numpy() for column in batch.columns)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def keys(self) -> np.ndarray:
        """All keys, sorted: int64 [N, 2]."""
        return np.stack([self._hi, self._lo], axis=1)

    @property
    def all_indices(self) -> np.ndarray:
        """The record indices of `keys`: uint32 [N]."""
        return self._indices

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Record indices of keys, -1 where a key is missing: int64 [B, 2] -> int64 [B]."""
        if len(keys) > _LARGE_LOOKUP:
            order = np.lexsort((keys[:, 1], keys[:, 0]))
            indices = np.empty(len(keys), dtype=np.int64)
            indices[order] = self._find(keys[order])
            return indices
        return self._find(keys)

    def _find(self, keys: np.ndarray) -> np.ndarray:
        hi, lo = keys[:, 0], keys[:, 1]
        position = np.searchsorted(self._hi, hi)
        last = len(self._hi) - 1
        if last < 0:
            return np.full(len(keys), -1, dtype=np.int64)
        while True:  # continues only where two keys share their first 64 bits
            near = np.minimum(position, last)
            hi_fits = (position <= last) & (self._hi[near] == hi)
            found = hi_fits & (self._lo[near] == lo)
            advance = hi_fits & ~found
            if not advance.any():
                break
            position = position + advance
        return np.where(found, self._indices[near].astype(np.int64), -1)

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
