"""Read cached teacher signals by content key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ds_distill.cache.blocks import TeacherBlocks
from ds_distill.cache.codecs import Encoded
from ds_distill.cache.format import Fingerprint, Manifest, check_fingerprint, damaged
from ds_distill.cache.index import KeyIndex
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError
from ds_distill.types import Signals


class CacheReader:
    """Reads a cache folder, memory-mapped, from any number of threads, forks and ranks at once."""

    def __init__(self, path: Path, *, checks: bool = True) -> None:
        """
        checks: verify each block's checksum when it is first read.

        Raises UserError when the folder is not a finished cache of this format.
        """
        self._path, self._checks = path, checks
        self.manifest = Manifest.read(path)
        index = self.manifest.index
        self._index = KeyIndex(path, index.file, index.checksum)
        if len(self._index) != self.manifest.examples:
            raise damaged(path, index.file)
        self._blocks: dict[str, TeacherBlocks] = {}

    @property
    def teachers(self) -> list[str]:
        return list(self.manifest.teachers)

    @property
    def mask_variants(self) -> int | None:
        """Mask variants of each example; None for sequence-level signals."""
        return next(iter(self.manifest.teachers.values())).signals.mask_variants

    def check(self, teacher: str, fingerprint: Fingerprint) -> None:
        """Raises UserError when the cache lacks a teacher, or the teacher has changed since."""
        if teacher not in self.manifest.teachers:
            raise UserError(
                f"cache {self._path}: has no teacher {teacher!r}, only "
                f"{', '.join(self.teachers)}. Name another folder (phases.cache.folder), or "
                "remove this one and build the cache again."
            )
        check_fingerprint(
            self._path, teacher, self.manifest.teachers[teacher].fingerprint, fingerprint
        )

    def check_same(self, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]) -> None:
        """Raises UserError unless the cache has exactly these teachers, with these signals."""
        for teacher, (fingerprint, schema) in teachers.items():
            self.check(teacher, fingerprint)
            stored = self.manifest.teachers[teacher].signals
            for what, value in schema:
                check_fingerprint(self._path, teacher, {what: getattr(stored, what)}, {what: value})
        others = set(self.teachers) - set(teachers)
        if others:
            raise UserError(
                f"cache {self._path}: also has teacher {sorted(others)[0]!r}, which is not in the "
                "recipe, so its new records would be missing. Name another folder "
                "(phases.cache.folder)."
            )

    def holds(self, keys: torch.Tensor) -> np.ndarray:
        """Which content keys are in the cache: int64 [B, 2] -> bool [B]."""
        return self._index.find(keys.numpy()) >= 0

    def indices(self, keys: torch.Tensor) -> np.ndarray:
        """Record indices of content keys: int64 [B, 2] -> int64 [B].

        Raises UserError when a key is missing.
        """
        indices = self._index.indices(keys)
        blocks = self._blocks_of(self.teachers[0])
        if not blocks.has(indices).all():
            raise damaged(self._path, self.manifest.index.file)
        return indices

    def read(self, teacher: str, indices: np.ndarray, variant: int = 0) -> Signals:
        """A teacher's signals of the records `indices`, int64 [n], on the CPU: logits float32
        [n, C] and the stored hidden states.

        variant: the mask variant of token-level signals, which have one row per masked token.
        Raises UserError when a block that is read is damaged.
        """
        return self.manifest.teachers[teacher].signals.decode(self._read(teacher, indices, variant))

    def log_probs(self, teacher: str, indices: np.ndarray, variant: int = 0) -> torch.Tensor:
        """Full distributions of the same records: float32 [n, C]; see `SignalSchema.log_probs`."""
        return self.manifest.teachers[teacher].signals.log_probs(
            self._read(teacher, indices, variant)
        )

    def _read(self, teacher: str, indices: np.ndarray, variant: int) -> dict[str, Encoded]:
        blocks = self._blocks_of(teacher)
        if self.manifest.teachers[teacher].signals.mask_variants is None:
            return blocks.read(indices)
        return blocks.read_lists(indices, variant)

    def verify(self) -> None:
        """Check every byte. Raises UserError that names the first damaged file."""
        for teacher in self.teachers:
            self._blocks_of(teacher).verify()

    def _blocks_of(self, teacher: str) -> TeacherBlocks:
        if teacher not in self._blocks:
            manifest = self.manifest
            self._blocks[teacher] = TeacherBlocks(
                self._path,
                teacher,
                manifest.teachers[teacher],
                manifest.block_rows,
                manifest.blocks,
                self._checks,
            )
        return self._blocks[teacher]
