"""Read what teachers said, by content key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ds_distill.cache.format import (
    FORMAT,
    INDEX,
    MANIFEST,
    Fingerprint,
    check_fingerprint,
    file_checksum,
    manifest_checksum,
)
from ds_distill.errors import UserError
from ds_distill.files import read_json


class CacheReader:
    """A cache folder, memory-mapped. Files are checked against the manifest when opened."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when the folder is no whole cache of this format."""
        self._path = path
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"cache {path}: there is no {MANIFEST}, so the cache was never finished. "
                "Run the cache phase again."
            )
        self._manifest = self._read_manifest()
        self._check_file(INDEX, self._manifest["index"]["checksum"])
        index = np.load(path / INDEX, mmap_mode="r", allow_pickle=False)
        self._high, self._low = np.ascontiguousarray(index[:, 0]), index[:, 1]
        self._logits: dict[str, np.ndarray] = {}

    @property
    def teachers(self) -> list[str]:
        return list(self._manifest["teachers"])

    def check(self, teacher: str, fingerprint: Fingerprint) -> None:
        """Refuse words of a teacher that has changed since. Raises UserError."""
        if teacher not in self._manifest["teachers"]:
            raise UserError(
                f"cache {self._path}: holds no teacher {teacher!r}, only "
                f"{', '.join(self.teachers)}. Remove the folder and run the cache phase again."
            )
        held = self._manifest["teachers"][teacher]["fingerprint"]
        check_fingerprint(self._path, teacher, held, fingerprint)

    def rows(self, keys: torch.Tensor) -> np.ndarray:
        """Row numbers of content keys: int64 [B, 2] -> int64 [B].

        Raises UserError when a key is not there: a missing row is never guessed.
        """
        wanted = keys.numpy()
        rows = np.searchsorted(self._high, wanted[:, 0])
        last = len(self._high) - 1  # a cache is never empty: no split is
        while True:  # steps on only where two keys share their first 64 bits
            at = np.minimum(rows, last)
            high_fits = (rows <= last) & (self._high[at] == wanted[:, 0])
            step_on = high_fits & (self._low[at] != wanted[:, 1])
            if not step_on.any():
                break
            rows = rows + step_on
        if not high_fits.all():
            missing = wanted[~high_fits]
            raise UserError(
                f"cache {self._path}: {len(missing)} of {len(wanted)} examples asked for are not "
                f"in it, e.g. key {missing[0].tolist()}. The data changed since it was built: "
                "remove the folder and run the cache phase again."
            )
        return rows

    def logits(self, teacher: str, rows: np.ndarray) -> torch.Tensor:
        """A teacher's logits at row numbers: float32 [B, C]."""
        if teacher not in self._logits:
            self._logits[teacher] = self._open(teacher)
        return torch.from_numpy(self._logits[teacher][rows].astype(np.float32))

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = read_json(self._path / MANIFEST)
        except ValueError:  # no JSON, or no text at all
            manifest = None
        if not isinstance(manifest, dict):
            raise self._damaged(MANIFEST)
        # Before the checksum, which another format may take of something else.
        if manifest.get("format") != FORMAT:
            raise UserError(
                f"cache {self._path}: format {manifest.get('format')}, and this version reads "
                f"format {FORMAT}. Remove the folder and run the cache phase again."
            )
        if manifest.get("checksum") != manifest_checksum(manifest):
            raise self._damaged(MANIFEST)
        return manifest

    def _open(self, teacher: str) -> np.ndarray:
        [shard] = self._manifest["teachers"][teacher]["shards"]
        name = f"{teacher}/{shard['file']}"
        self._check_file(name, shard["checksum"])
        with pa.memory_map(str(self._path / name)) as source:
            table = pa.ipc.open_stream(source).read_all()
        column = table.column("logits").combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False)
        return values.reshape(len(column), column.type.list_size)

    def _check_file(self, name: str, checksum: str) -> None:
        file = self._path / name
        if not file.is_file() or file_checksum(file) != checksum:
            raise self._damaged(name)

    def _damaged(self, name: str) -> UserError:
        return UserError(
            f"cache {self._path}: {name} is missing or damaged (its checksum does not fit). "
            "Remove the folder and run the cache phase again."
        )
