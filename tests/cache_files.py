"""Caches for tests: signals are a function of teacher and key, so any record can be checked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ds_distill.cache.build import LOCK, Build, remove_leftovers
from ds_distill.cache.build_plan import Plan
from ds_distill.cache.format import MANIFEST, Manifest
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.keys import content_keys
from ds_distill.types import Signals

PRINT: dict[str, Any] = {
    "weights": "w1",
    "tokenizer": "t1",
    "max_length": 128,
    "labels": ["a", "b", "c"],
}

TWO = {
    "first": SignalSchema(dtype="float32", classes=3),
    "second": SignalSchema(dtype="float16", classes=5, hidden={-1: 4}),
}
LISTS = {
    "first": SignalSchema(dtype="float16", classes=7, mask_variants=3),
    "second": SignalSchema(dtype="bfloat16", classes=2, hidden={0: 3}, mask_variants=3),
}


def make_keys(count: int, prefix: str = "") -> np.ndarray:
    return content_keys([f"text {prefix}{number}" for number in range(count)])


def list_lengths(keys: np.ndarray, variant: int) -> np.ndarray:
    """Tokens chosen in a mask variant, 0 to 3: int64 [n]."""
    return (keys[:, 1] + variant) % 4


def signals_of(teacher: str, schema: SignalSchema, keys: np.ndarray, variant: int = 0) -> Signals:
    """A teacher's signals of keys, as they are read back from a cache.

    Under `mask_variants` one list after the other, of all keys in one variant.
    """
    position = np.zeros(len(keys), dtype=np.int64)
    if schema.mask_variants is not None:
        lengths = list_lengths(keys, variant)
        keys = np.repeat(keys, lengths, axis=0)
        before = np.repeat(np.cumsum(lengths) - lengths, lengths)
        position = np.arange(len(keys)) - before + 10 * variant
    dtype = getattr(torch, schema.dtype)

    def numbers(column: str, width: int) -> torch.Tensor:
        seed = np.uint64(int.from_bytes(f"{teacher}{column}".encode()[-7:], "big"))
        mixed = (keys[:, :1] ^ keys[:, 1:]).astype(np.uint64) + seed
        mixed = mixed + position[:, None].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed + np.arange(width, dtype=np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        values = (mixed >> np.uint64(40)).astype(np.float32) / 2**20 - 8
        made = torch.empty(values.shape)
        made[:] = torch.tensor(values)
        return made.to(dtype).float()

    hidden = {layer: numbers(f"hidden{layer}", width) for layer, width in schema.hidden.items()}
    return Signals(numbers("logits", schema.classes), hidden)


def block(teacher: str, schema: SignalSchema, keys: np.ndarray) -> pa.RecordBatch:
    """A block with a teacher's signals of keys, encoded if there is a codec."""
    if schema.mask_variants is None:
        return schema.record_batch([schema.encode(signals_of(teacher, schema, keys))])
    parts = [
        schema.encode(signals_of(teacher, schema, keys, variant))
        for variant in range(schema.mask_variants)
    ]
    counts = np.concatenate(
        [list_lengths(keys, variant) for variant in range(schema.mask_variants)]
    )
    return schema.record_batch(parts, counts)


def write_cache(
    path: Path,
    keys: np.ndarray | list[np.ndarray],
    schemas: Mapping[str, SignalSchema],
    *,
    block_rows: int = 8,
    ranks: int = 1,
    fingerprint: Mapping[str, Any] = PRINT,
    acknowledge: Callable[[str, int], None] = lambda teacher, number: None,
) -> None:
    """Write what the cache lacks, as the cache phase does: all ranks' blocks, in turn, with the
    other processes that do the same.

    keys: of each split.
    acknowledge: called with teacher and number of each block that was written.
    """
    teachers = {name: (dict(fingerprint), schema) for name, schema in schemas.items()}
    splits = [keys] if isinstance(keys, np.ndarray) else keys
    while True:
        missing, first_block = splits, 0
        if (path / MANIFEST).is_file():
            reader = CacheReader(path)
            reader.check_same(teachers)
            missing = [part[~reader.holds(torch.tensor(part.copy()))] for part in splits]
            block_rows, first_block = reader.manifest.block_rows, reader.manifest.blocks
        plan = Plan(first_block, block_rows, missing)
        if plan.examples == 0:
            remove_leftovers(path)
            return
        build = Build(path, plan, teachers)
        if build.join() is not None:
            break
    for name in schemas:
        while (claimed := build.claim(name, ranks)) is not None:
            for at in claimed:
                if at is not None:
                    write_block(build, name, at)
                    acknowledge(name, plan.first_block + at)
            if claimed == [None] * ranks:
                time.sleep(0.01)
    build.finish()


def write_block(build: Build, teacher: str, at: int) -> None:
    split, part = build.plan.blocks[at]
    batch = block(teacher, build.teachers[teacher][1], build.plan.keys[split][part])
    build.write(teacher, at, batch, part.stop - part.start)


def check_rows(path: Path, keys: np.ndarray, schemas: Mapping[str, SignalSchema]) -> None:
    """The cache has the teachers' signals of these keys."""
    reader = CacheReader(path)
    check_reads(reader, reader.indices(torch.from_numpy(keys)), keys, schemas)


def check_reads(
    reader: CacheReader, rows: np.ndarray, keys: np.ndarray, schemas: Mapping[str, SignalSchema]
) -> None:
    for name, schema in schemas.items():
        for variant in range(schema.mask_variants or 1):
            read, wanted = reader.read(name, rows, variant), signals_of(name, schema, keys, variant)
            assert torch.equal(read.logits, wanted.logits), name
            assert read.hidden.keys() == wanted.hidden.keys()
            for layer, states in wanted.hidden.items():
                assert torch.equal(read.hidden[layer], states), (name, layer)


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a cache but its lock, which is empty."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != LOCK
    }


def manifest_of(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text())


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """As somebody would who knows the format: with the checksum that fits."""
    from ds_distill.cache.format import _checksum

    content.pop("checksum", None)
    text = json.dumps({**content, "checksum": _checksum(content)})
    (path / MANIFEST).write_text(text)


def published(path: Path, schemas: Mapping[str, SignalSchema]) -> dict[tuple[str, int], bytes]:
    """Teacher and number -> the content of each block that is there, of builds without a manifest's
    shards of several."""
    return {
        (name, int(file.stem.removeprefix("shard-"))): file.read_bytes()
        for name in schemas
        for file in (path / name).glob("shard-*.arrow")
    }


def block_checksums(path: Path) -> dict[tuple[str, int], str]:
    """Teacher and number of each block -> the checksum of its bytes."""
    return {
        (name, block.number): block.checksum
        for name, teacher in Manifest.read(path).teachers.items()
        for shard in teacher.shards
        for block in shard.blocks
    }
