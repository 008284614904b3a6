"""A stranger's cache, whose checksums fit, can do no more than fail.

What is read is read in a forked child, which must not die of a signal: files are mapped, so a
read of what is not there would be one.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from cache_files import block, make_keys, manifest_of, write_cache, write_manifest

from ds_distill.cache.blocks import MappedShard
from ds_distill.cache.codecs import CompactCodec
from ds_distill.cache.format import END_OF_STREAM
from ds_distill.cache.index import SCHEMA
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError

KEYS = make_keys(12)
COMPACT = CompactCodec(40, 0.05).to_json()
KINDS = {
    "rows": {"t": SignalSchema(dtype="float32", classes=3, hidden={-1: 2})},
    "lists": {"t": SignalSchema(dtype="float16", classes=3, hidden={-1: 2}, mask_variants=2)},
    "packed": {
        "t": SignalSchema(
            dtype="float16",
            classes=40,
            codec=COMPACT,
            temperature=1.0,
            hidden={-1: 2},
            mask_variants=2,
        )
    },
}


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_cache(tmp_path / "cache", KEYS, KINDS[request.param], block_rows=8)
    return tmp_path / "cache"


def read_all(path: Path) -> None:
    """Reads and verifies; numbers may come out, or a UserError."""
    for read in (verify, read_rows):
        try:
            read(path)
        except UserError as error:
            assert str(path) in str(error)


def verify(path: Path) -> None:
    CacheReader(path).verify()


def read_rows(path: Path) -> None:
    reader = CacheReader(path)
    rows = reader.indices(torch.from_numpy(KEYS))
    for teacher in reader.teachers:
        for variant in range(reader.mask_variants or 1):
            signals = reader.read(teacher, rows, variant)
            parts = [*signals.hidden.values()]
            if reader.manifest.teachers[teacher].signals.codec is None:
                parts.append(signals.logits)
            else:
                with suppress(ValueError):  # what its codec cannot have written
                    whole = signals.to(torch.device("cpu"))
                    top = whole.top
                    parts += dataclasses.astuple(top) if top is not None else [whole.logits]
            assert len({len(part) for part in parts}) == 1
            for part in parts:
                assert torch.isfinite(part).sum() >= 0  # touches every number


def in_a_fork(tmp_path: Path, work: Callable[[], None]) -> None:
    """Raises AssertionError when a process that does the work dies of a signal, or fails."""
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(120)  # nothing may go on for ever either
        torch.set_num_threads(1)  # its pool of threads does not survive a fork
        try:
            work()
            code = 0
        except BaseException:
            (tmp_path / "error").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFSIGNALED(status), f"killed by signal {os.WTERMSIG(status)}"
    assert status == 0, (tmp_path / "error").read_text()


def refused(path: Path, match: str, read: Callable[[Path], None] = read_rows) -> None:
    def work() -> None:
        with pytest.raises(UserError, match=match):
            read(path)

    in_a_fork(path.parent, work)


# ------------------------------------------------------------------------------ fuzz


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Some bytes changed: bits, runs, or numbers of the format that become extreme ones."""
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(changed))
        kind = draw.choice(["bit", "run", "int32", "int64", "int64"])
        if kind == "bit":
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == "run":
            changed[at : at + 8] = draw.randbytes(len(changed[at : at + 8]))
        else:
            size = 4 if kind == "int32" else 8
            at = at // size * size
            was = int.from_bytes(changed[at : at + size], "little")
            value = draw.choice([0, 1, was + 1, was * 2, was << 16, 2**31 - 1, 2**31, 2**63 - 1])
            value = draw.choice([value, -value]) % 2 ** (8 * size)
            changed[at : at + size] = value.to_bytes(size, "little")[: len(changed) - at]
    return bytes(changed)


def forge_shard(path: Path, change: Callable[[bytes, int], bytes]) -> None:
    """Change the content of each block, and make the manifest fit.

    change: a block's bytes and number -> its bytes.
    """
    manifest = manifest_of(path)
    for teacher, held in manifest["teachers"].items():
        for shard in held["shards"]:
            file = path / teacher / shard["file"]
            content = file.read_bytes()
            parts = [content[: shard["blocks"][0][2]]]
            for place in shard["blocks"]:
                number, _, begin, length, _ = place
                parts.append(change(content[begin : begin + length], number))
                place[2:] = [sum(map(len, parts[:-1])), len(parts[-1]), checksum(parts[-1])]
            parts.append(END_OF_STREAM)
            file.write_bytes(b"".join(parts))
            shard["bytes"] = sum(map(len, parts))
            shard["checksum"] = checksum(parts[0] + parts[-1])
    write_manifest(path, manifest)


def forge_index(path: Path, change: Callable[[bytes], bytes]) -> None:
    manifest = manifest_of(path)
    file = path / manifest["index"]["file"]
    file.write_bytes(change(file.read_bytes()))
    manifest["index"]["checksum"] = checksum(file.read_bytes())
    write_manifest(path, manifest)


def checksum(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


@pytest.mark.parametrize("batch", range(3))
@pytest.mark.parametrize("target", ["shard", "index"])
def test_random_changes_with_checksums_that_fit(target, batch, cache):
    def work() -> None:
        for seed in range(1000 * batch, 1000 * batch + 120):
            (cache.parent / "seed").write_text(str(seed))
            draw = random.Random(seed)
            shutil.copytree(cache, copy := cache.with_name(f"copy-{seed}"))
            if target == "shard":
                forge_shard(copy, lambda content, _, draw=draw: mutate(content, draw))
            else:
                forge_index(copy, lambda content, draw=draw: mutate(content, draw))
            read_all(copy)
            shutil.rmtree(copy)

    try:
        in_a_fork(cache.parent, work)
    except AssertionError as error:
        pytest.fail(f"seed {(cache.parent / 'seed').read_text()}: {error}")


def test_the_forger_makes_caches_that_are_read(cache):
    """The check of the fuzz: without a change all is as before."""
    forge_shard(cache, lambda content, _: content)
    forge_index(cache, lambda content: content)
    verify(cache)
    read_rows(cache)


# ---------------------------------------------------------------------------- shards


def forge_batch(path: Path, change: Callable[[pa.RecordBatch], pa.RecordBatch], **how: Any) -> None:
    """Replace the blocks by others that Arrow itself finds sound.

    how: options of Arrow's writer.
    """
    teacher = CacheReader(path).manifest.teachers["t"]
    schema = teacher.signals.arrow_schema()

    def write(content: bytes, number: int) -> bytes:
        batch = change(pa.ipc.read_record_batch(pa.py_buffer(content), schema))
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(**how)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
            stream.write_batch(batch)
        whole = sink.getvalue().to_pybytes()
        return whole[len(batch.schema.serialize()) : -len(END_OF_STREAM)]

    forge_shard(path, write)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_blocks_are_refused(codec, cache):
    """Arrow unpacks them to memory of its own: they have no place in the file."""
    forge_batch(cache, lambda batch: batch, compression=codec)
    refused(cache, "t/shard-")


def test_blocks_of_other_sizes_are_refused(cache):
    for change in (
        lambda batch: batch.slice(0, 0),
        lambda batch: batch.slice(0, len(batch) - 1),
        lambda batch: pa.concat_batches([batch, batch]),
    ):
        shutil.copytree(cache, copy := cache.with_name("copy"))
        forge_batch(copy, change)
        refused(copy, "t/shard-")
        shutil.rmtree(copy)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("column", [0, 1])
def test_missing_values_are_refused(depth, column, cache):
    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        items = batch.column(column).to_pylist()
        row = next(at for at, item in enumerate(items) if item)
        if depth:
            items[row][0] = None
        else:
            items[row] = None
        changed = pa.array(items, batch.schema.field(column).type)
        return batch.set_column(column, batch.schema.field(column), changed)

    forge_batch(cache, change)
    refused(cache, "t/shard-")


@pytest.mark.parametrize("cache", ["lists"], indirect=True)
@pytest.mark.parametrize("value", [-1, 1, 1000, 2**31 - 1, -(2**31)])
def test_lists_that_lie_outside_are_refused(value, cache):
    def change(content: bytes, number: int) -> bytes:
        schema = CacheReader(cache).manifest.teachers["t"].signals
        batch = pa.ipc.read_record_batch(pa.py_buffer(content), schema.arrow_schema())
        offsets = batch.column(0).offsets.to_numpy()
        at = content.index(offsets.tobytes())
        for place in (4 * (len(offsets) - 1), 4 * (len(offsets) // 2)):
            if value in (-1, 1):
                [was] = struct.unpack_from("<i", content, at + place)
                content = set_offset(content, at + place, was + 100 * value)
            else:
                content = (
                    content[: at + place] + struct.pack("<i", value) + content[at + place + 4 :]
                )
        return content

    forge_shard(cache, change)
    refused(cache, "t/shard-")


def set_offset(content: bytes, at: int, value: int) -> bytes:
    return content[:at] + struct.pack("<i", value) + content[at + 4 :]


@pytest.mark.parametrize("cache", ["lists"], indirect=True)
def test_columns_with_unlike_lists_are_refused(cache):
    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        lists = batch.column(1).to_pylist()
        row = next(at for at, item in enumerate(lists) if item)
        lists[row] = lists[row][:-1]
        changed = pa.array(lists, batch.schema.field(1).type)
        return batch.set_column(1, batch.schema.field(1), changed)

    forge_batch(cache, change)
    refused(cache, "t/shard-")


# ----------------------------------------------------------------------------- index


def forged_index(**columns: Any) -> bytes:
    """An index file. columns: pyarrow arrays by name, all of SCHEMA's unless given."""
    order = np.lexsort((KEYS[:, 1], KEYS[:, 0]))
    made = {"key_hi": pa.array(KEYS[order, 0]), "key_lo": pa.array(KEYS[order, 1])}
    made |= {"row": pa.array(np.arange(len(KEYS)), pa.uint32())} | columns
    batch = pa.RecordBatch.from_pydict(made)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("rows", [[12], [15, 100], [2**32 - 1] * 3])
def test_rows_that_point_outside_are_refused(rows, cache):
    row = np.arange(len(KEYS))
    row[: len(rows)] = rows
    forge_index(cache, lambda _: forged_index(row=pa.array(row, pa.uint32())))
    refused(cache, "index-2.arrow")


def test_rows_of_another_type_are_refused(cache):
    content = {
        "wide": forged_index(row=pa.array(np.arange(12))),
        "null": forged_index(row=pa.array([None, *range(11)], pa.uint32())),
        "more": forged_index(more=pa.array(np.arange(12))),
        "short": forged_index(
            key_hi=pa.array(KEYS[:5, 0]),
            key_lo=pa.array(KEYS[:5, 1]),
            row=pa.array(range(5), pa.uint32()),
        ),
        "no stream": b"ARROW1\0\0" * 10,
        "no batch": pa.ipc.new_stream(sink := pa.BufferOutputStream(), SCHEMA).close()
        or sink.getvalue().to_pybytes(),
    }
    for name, forged in content.items():
        shutil.copytree(cache, copy := cache.with_name(name))
        forge_index(copy, lambda _, forged=forged: forged)
        refused(copy, "index-2.arrow", CacheReader)


# --------------------------------------------------------------------------- signals


@pytest.mark.parametrize("classes", [2, 4, 10**6, 2**31 - 1, 2**31, 2**62, 2**70])
@pytest.mark.parametrize("cache", ["rows", "lists"], indirect=True)
def test_signals_of_another_width_are_refused(classes, cache):
    manifest = manifest_of(cache)
    manifest["teachers"]["t"]["signals"]["classes"] = classes
    write_manifest(cache, manifest)
    refused(cache, "t/shard-|manifest.json")


@pytest.mark.parametrize("variants", [None, 1, 3, 10**9, 2**70])
@pytest.mark.parametrize("cache", ["lists"], indirect=True)
def test_signals_of_other_mask_variants_are_refused(variants, cache):
    manifest = manifest_of(cache)
    manifest["teachers"]["t"]["signals"]["mask_variants"] = variants
    write_manifest(cache, manifest)
    refused(cache, "t/shard-|manifest.json")


def test_a_block_is_what_the_tests_take_it_for(cache):
    """The forger's blocks begin as the real ones do."""
    schema = CacheReader(cache).manifest.teachers["t"].signals
    shard = manifest_of(cache)["teachers"]["t"]["shards"][0]
    content = (cache / "t" / shard["file"]).read_bytes()
    _, _, begin, length, _ = shard["blocks"][0]
    assert content[begin : begin + length] == block("t", schema, KEYS[:8]).serialize().to_pybytes()


@pytest.mark.parametrize(
    "changed",
    [
        {"codec": "none such"},
        {"codec": None},
        {"vocabulary": 1},
        {"vocabulary": 41},
        {"vocabulary": 2**40},
        {"vocabulary": "40"},
        {"threshold": -1.0},
        {"tail": {}},
        {"tail": []},
        {"more": 1},
    ],
)
@pytest.mark.parametrize("cache", ["packed"], indirect=True)
def test_codecs_that_there_are_not_are_refused(changed, cache):
    manifest = manifest_of(cache)
    manifest["teachers"]["t"]["signals"]["codec"] |= changed
    write_manifest(cache, manifest)
    refused(cache, "manifest.json", CacheReader)


@pytest.mark.parametrize("cache", ["packed"], indirect=True)
def test_a_codec_without_mask_variants_is_refused(cache):
    manifest = manifest_of(cache)
    manifest["teachers"]["t"]["signals"]["mask_variants"] = None
    write_manifest(cache, manifest)
    refused(cache, "manifest.json", CacheReader)


def test_nothing_beyond_a_file_can_be_read(tmp_path):
    """Whatever the checks let through: the last item ends with the file."""
    (tmp_path / "shard").write_bytes(bytes(range(10)))
    shard = MappedShard(tmp_path / "shard")
    assert shard.items(4)[np.array([6, 0])].tobytes() == bytes([6, 7, 8, 9, 0, 1, 2, 3])
    for offset in (7, 10, 2**40):
        with pytest.raises(IndexError):
            shard.items(4)[np.array([offset])]
    assert len(shard.items(11)) == 0
