"""Read cached teacher signals, by content key, and describe caches to the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ds_distill.cache.blocks import TeacherBlocks
from ds_distill.cache.codecs import Encoded
from ds_distill.cache.format import (
    MANIFEST,
    Fingerprint,
    KeyIndex,
    Manifest,
    Teacher,
    check_fingerprint,
)
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError
from ds_distill.types import Signals


class CacheReader:
    """A cache folder, memory-mapped, for any number of threads, forks and ranks at once.

    reader = CacheReader("runs/my/cache/00-cache")
    indices = reader.indices(content_keys(texts))
    logits = reader.read("bert", indices).logits
    """

    def __init__(self, path: str | Path) -> None:
        """
        path: the folder that holds manifest.json. A block's checksum is compared when it is first
            touched.

        Raises UserError when the folder is not a finished cache of this format.
        """
        path = Path(path)
        self.path = path
        self.manifest = Manifest.read(path)
        index = self.manifest.index
        self._index = KeyIndex(path, index.file, index.checksum)
        self._blocks: dict[str, TeacherBlocks] = {}

    @property
    def teachers(self) -> list[str]:
        """Names of the teachers whose signals it holds."""
        return list(self.manifest.teachers)

    @property
    def labels(self) -> list[str] | None:
        """Class names, in the order of the logits' columns; None of masked-LM teachers."""
        labels = next(iter(self.manifest.teachers.values())).fingerprint.get("labels")
        return labels["labels"] if isinstance(labels, dict) else labels

    @property
    def mask_variants(self) -> int | None:
        """Mask variants of each example; None where signals are of whole sequences."""
        return next(iter(self.manifest.teachers.values())).signals.mask_variants

    def check(self, teacher: str, fingerprint: Fingerprint) -> None:
        """Refuse signals of a teacher that has changed since. Raises UserError."""
        check_fingerprint(self.path, teacher, self._teacher(teacher).fingerprint, fingerprint)

    def _teacher(self, teacher: str) -> Teacher:
        """Raises UserError when the cache does not hold it."""
        if teacher not in self.manifest.teachers:
            raise UserError(
                f"cache {self.path}: has no teacher {teacher!r}, only "
                f"{', '.join(self.teachers)}. Name another folder (phases.cache.folder), or "
                "remove this one and build the cache again."
            )
        return self.manifest.teachers[teacher]

    def check_same(self, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]) -> None:
        """Raises UserError unless the cache has exactly these teachers, with these signals."""
        for teacher, (fingerprint, schema) in teachers.items():
            self.check(teacher, fingerprint)
            stored = self.manifest.teachers[teacher].signals
            for what, value in schema:
                check_fingerprint(self.path, teacher, {what: getattr(stored, what)}, {what: value})
        others = set(self.teachers) - set(teachers)
        if others:
            raise UserError(
                f"cache {self.path}: also has teacher {sorted(others)[0]!r}, which this "
                "phase does not have, so its new records would be missing. Name another folder "
                "(phases.cache.folder)."
            )

    def holds(self, keys: torch.Tensor | np.ndarray) -> np.ndarray:
        """Whether each content key is in the cache: int64 [B, 2] -> bool [B]."""
        return self._index.find(torch.as_tensor(keys).numpy()) >= 0

    def indices(self, keys: torch.Tensor | np.ndarray) -> np.ndarray:
        """Record indices of content keys: int64 [B, 2] -> int64 [B].

        keys: as `content_keys` makes them, on the CPU.

        Raises UserError when a key is not in the cache: a missing record is never guessed.
        """
        return self._index.indices(torch.as_tensor(keys))

    def read(
        self, teacher: str, indices: np.ndarray, variant: int = 0, *, as_stored: bool = False
    ) -> Signals:
        """A teacher's signals at `indices`, int64 [B], on the CPU: for whole sequences logits
        float32 [B, C]; for masked tokens n rows, those of each example's masked tokens one after
        the other, encoded by a codec until `Signals.to(device)`; and the hidden states that were
        cached.

        variant: mask variant, of a masked-LM teacher.
        as_stored: leave logits without a codec encoded, too, where rows are masked tokens or words
            and have all classes: over a vocabulary they are the largest tensor of a step.

        Raises UserError when the cache does not hold the teacher, or a block that is touched is
        damaged.
        """
        signals = self._teacher(teacher).signals
        return signals.decode(self._read(teacher, indices, variant), as_stored=as_stored)

    def log_probs(self, teacher: str, indices: np.ndarray, variant: int = 0) -> torch.Tensor:
        """Whole distributions of the same records: float32 [n, C]; see `SignalSchema.log_probs`."""
        return self._teacher(teacher).signals.log_probs(self._read(teacher, indices, variant))

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
                self.path,
                teacher,
                manifest.teachers[teacher],
                manifest.block_rows,
                manifest.blocks,
            )
        return self._blocks[teacher]


def caches_in(folder: Path) -> list[Path]:
    """The folder itself if it is a cache, else the caches of a run's folder. Raises UserError where
    there is none."""
    if (folder / MANIFEST).is_file():
        return [folder]
    found = sorted(file.parent for file in folder.glob(f"cache/*/{MANIFEST}"))
    if not found:
        raise UserError(
            f"{folder}: neither a finished cache nor a run's folder that holds one. Build one: "
            "ds-distill cache build RECIPE"
        )
    return found


def describe(cache: Path) -> str:
    """What a cache holds and how large it is, as text of several lines."""
    manifest = Manifest.read(cache)
    lines = [
        f"{cache}",
        f"  examples      {manifest.examples:,} (index {_size(cache / manifest.index.file)})",
    ]
    for name, teacher in manifest.teachers.items():
        schema, size = teacher.signals, sum(shard.bytes for shard in teacher.shards)
        stored = f"logits {schema.classes} x {schema.dtype}"
        if schema.codec is not None:
            settings = {k: v for k, v in schema.codec.items() if k not in ("codec", "tail")}
            stored = f"codec {schema.codec['codec']}, {settings}, temperature {schema.temperature}"
        stored += "".join(f", layer {layer} {width}" for layer, width in schema.hidden.items())
        stored += f", {schema.mask_variants} mask variants" if schema.mask_variants else ""
        lines += [
            f"  {name}",
            f"    stores      {stored}",
            f"    files       {len(teacher.shards)} shards, {size / 2**20:,.1f} MiB, "
            f"{size / max(manifest.examples, 1):,.1f} bytes per example",
            *([f"    not given   {teacher.not_given:,} examples"] if teacher.not_given else []),
            *(f"    {what:<11} {value}" for what, value in teacher.fingerprint.items()),
        ]
    return "\n".join(lines)


def _size(file: Path) -> str:
    return f"{file.stat().st_size / 2**20:,.1f} MiB"
