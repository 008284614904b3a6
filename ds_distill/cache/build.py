"""Writing a cache: by any number of ranks, killed at any moment, continued by the same call.

The rows that a cache lacks are cut into blocks, and block b is written by rank b mod the
number of ranks. A rank appends its blocks to a shard of its own, syncs the shard, and only
then notes the block in its journal, which it syncs too. What a journal notes is there after a
power cut; what it does not note is written again. `finish_build` turns the journals into the
manifest.

    .building/plan.json                            what is being built (see `plan`)
    .building/TEACHER.RANK-of-RANKS.jsonl          journals: a line per block
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from ds_distill.cache.format import (
    END_OF_STREAM,
    MANIFEST,
    Block,
    Fingerprint,
    Index,
    Manifest,
    Shard,
    Teacher,
    file_checksum,
)
from ds_distill.cache.index import KeyIndex, write_index
from ds_distill.cache.plan import BUILDING, Plan, check_same_plan, read_plan, write_plan
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError
from ds_distill.files import sync

LOCK = ".lock"
"""A name that no teacher has."""

# --------------------------------------------------------------------------- the main process


@contextmanager
def building(cache: Path) -> Iterator[None]:
    """Nobody else builds this cache meanwhile. Main process. Raises UserError when one does."""
    cache.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(cache)
    try:
        yield
    finally:
        (cache / LOCK).unlink(missing_ok=True)
        os.close(descriptor)


def _lock(cache: Path) -> int:
    """Takes a lock that ends with its process; gives the file descriptor that holds it."""
    while True:
        descriptor = os.open(cache / LOCK, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), (cache / LOCK).stat()):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise UserError(
                f"cache {cache}: another process is building it. Wait for it, or name another "
                "folder (phases.cache.folder)."
            ) from error
        except FileNotFoundError:
            pass
        os.close(descriptor)  # it was removed with the lock of a build that has just ended


def start_build(
    cache: Path, plan: Plan, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]
) -> int:
    """Make ready for the blocks of a plan; what an earlier build of the same plan left is kept.

    Main process; the others wait for it. Returns the number of blocks, of all teachers, that
    are there already. Raises UserError when an unfinished build is of another plan, or its plan
    is damaged.
    """
    folder = cache / BUILDING
    manifest = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
    held = read_plan(cache, manifest)
    if held is not None:
        check_same_plan(cache, held, plan, teachers)
        return sum(
            len(shard.blocks)
            for name, (_, schema) in teachers.items()
            for shard in _written(cache, name, schema)
        )
    discard_build(cache)
    for name in teachers:
        (cache / name).mkdir(exist_ok=True)
        sync(cache / name)
    folder.mkdir()
    sync(cache)
    for parent in (cache.parent, cache.parent.parent):
        sync(parent)
    write_plan(cache, plan, teachers)
    return 0


def finish_build(
    cache: Path, plan: Plan, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]
) -> None:
    """Turn a build whose blocks are all written into a part of the cache. Main process, after
    the others have closed their shards."""
    old = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
    entries = {}
    for name, (fingerprint, schema) in teachers.items():
        shards = _written(cache, name, schema)
        there = {block.number for shard in shards for block in shard.blocks}
        wanted = set(range(plan.first_block, plan.first_block + len(plan.blocks)))
        assert there == wanted, f"blocks {sorted(wanted ^ there)[:5]} of {name}"
        for shard in shards:
            _close_shard(cache / name / shard.file, shard)
        sync(cache / name)
        before = old.teachers[name].shards if old else []
        entries[name] = Teacher(fingerprint=fingerprint, signals=schema, shards=before + shards)
    keys, indices = np.concatenate(plan.keys), plan.indices()
    if old is not None:
        index = KeyIndex(cache, old.index.file, old.index.checksum)
        keys = np.concatenate([index.keys, keys])
        indices = np.concatenate([index.all_indices, indices])
    blocks = plan.first_block + len(plan.blocks)
    index_file = cache / f"index-{blocks}.arrow"
    write_index(index_file, keys, indices)
    Manifest(
        examples=len(keys),
        block_rows=plan.block_rows,
        blocks=blocks,
        index=Index(file=index_file.name, checksum=file_checksum(index_file)),
        teachers=entries,
    ).write(cache)
    discard_build(cache)


def discard_build(cache: Path) -> None:
    """Drop what is left of a build that nothing needs any more. Main process."""
    if (cache / BUILDING).exists():
        shutil.rmtree(cache / BUILDING)
    _remove_leftovers(cache)


def _remove_leftovers(cache: Path) -> None:
    """Drop files of builds that never finished, and indexes that were replaced."""
    listed = {LOCK, MANIFEST}
    if (cache / MANIFEST).is_file():
        manifest = Manifest.read(cache)
        listed.add(manifest.index.file)
        for name, teacher in manifest.teachers.items():
            listed |= {f"{name}/{shard.file}" for shard in teacher.shards}
    for pattern in ("index-*.arrow", "*/shard-*.arrow"):
        for file in cache.glob(pattern):
            if str(file.relative_to(cache)) not in listed:
                file.unlink()


def _close_shard(file: Path, shard: Shard) -> None:
    """Cut off a block that was never noted, and end the stream."""
    end = shard.bytes - len(END_OF_STREAM)
    with open(file, "r+b") as opened:
        opened.truncate(end)
        opened.seek(end)
        opened.write(END_OF_STREAM)
        opened.flush()
        os.fsync(opened.fileno())


# ------------------------------------------------------------------------------- every rank


def known_teachers(cache: Path) -> dict[str, tuple[Fingerprint, SignalSchema]]:
    """Teachers of the build that goes on, else of the cache as it is, else none.

    Raises UserError when the plan or the cache is damaged, OSError when it cannot be read.
    """
    manifest = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
    planned = read_plan(cache, manifest)
    if planned is not None:
        return planned.teachers
    entries = manifest.teachers if manifest else {}
    return {name: (entry.fingerprint, entry.signals) for name, entry in entries.items()}


def blocks_to_write(cache: Path, plan: Plan, teacher: str, schema: SignalSchema) -> list[int]:
    """Positions in `plan.blocks` of the blocks that no rank has written, in order."""
    numbers = {block.number for shard in _written(cache, teacher, schema) for block in shard.blocks}
    return [at for at in range(len(plan.blocks)) if plan.first_block + at not in numbers]


class ShardWriter:
    """One rank's blocks of one teacher."""

    def __init__(
        self, cache: Path, plan: Plan, teacher: str, schema: SignalSchema, rank: int, ranks: int
    ) -> None:
        """Continues the shard that the same rank of as many ranks began, if any."""
        place = f"{rank:05d}-of-{ranks:05d}"
        self._journal = cache / BUILDING / f"{teacher}.{place}.jsonl"
        self._file = cache / teacher / f"shard-{plan.first_block:08d}-{place}.arrow"
        self._first_block = plan.first_block
        self._schema = schema.arrow_schema()
        notes = [block for _, block in _noted(cache / teacher, self._journal)]
        header = self._schema.serialize().to_pybytes()
        self._end = max([note.offset + note.length for note in notes], default=len(header))
        self._notes_end = sum(len(_line(self._file.name, note)) for note in notes)
        # Nothing waits in a buffer of this process: a writer that failed would write it later,
        # when it is closed, over what another one wrote since.
        mode = "r+" if notes else "w+"
        self._shard, self._notes = FileIO(self._file, mode), FileIO(self._journal, mode)
        self._shard.truncate(self._end)
        self._notes.truncate(self._notes_end)
        if not notes:
            _write_at(self._shard, header, 0)
            sync(self._file.parent)
            sync(self._journal.parent)

    def append(self, at: int, batch: pa.RecordBatch, rows: int) -> None:
        """Write block `at` of the plan, of so many examples; on return it will survive a power
        cut. Raises OSError; blocks written before are kept, and another writer can continue."""
        message = memoryview(batch.serialize())
        _write_at(self._shard, message, self._end)
        os.fdatasync(self._shard.fileno())
        block = Block(
            self._first_block + at,
            rows,
            self._end,
            len(message),
            xxhash.xxh3_128_hexdigest(message),
        )
        line = _line(self._file.name, block)
        _write_at(self._notes, line, self._notes_end)
        os.fdatasync(self._notes.fileno())
        self._end += len(message)
        self._notes_end += len(line)

    def close(self) -> None:
        self._shard.close()
        self._notes.close()


def _write_at(file: FileIO, content: bytes | memoryview, offset: int) -> None:
    left = memoryview(content)
    while left:  # one call may write a part
        written = os.pwrite(file.fileno(), left, offset)
        left, offset = left[written:], offset + written


def _line(file: str, block: Block) -> bytes:
    return json.dumps([file, *block]).encode() + b"\n"


def _noted(teacher: Path, journal: Path) -> list[tuple[str, Block]]:
    """The blocks that a journal notes, with their shard's name. A last line that was cut off
    does not count, nor does what the shard is too short for: somebody else cut that off."""
    noted: list[tuple[str, Block]] = []
    if not journal.is_file():
        return noted
    sizes: dict[str, int] = {}  # a journal is of one shard: asked for once
    for line in journal.read_bytes().splitlines(keepends=True):
        try:
            file, *place = json.loads(line)
            block = Block(*place)
            size = sizes.get(file) or (teacher / file).stat().st_size
            sizes[file] = size
        except (ValueError, TypeError, FileNotFoundError):
            break
        if _line(file, block) != line or block.offset + block.length > size:
            break
        noted.append((file, block))
    return noted


def _journals(cache: Path, teacher: str) -> list[Path]:
    """Of all ranks, sorted. Raises OSError where the folder cannot be listed: a glob would find
    none there."""
    try:
        names = os.listdir(cache / BUILDING)
    except FileNotFoundError:
        return []
    own = [name for name in names if name.startswith(f"{teacher}.") and name.endswith(".jsonl")]
    return [cache / BUILDING / name for name in sorted(own)]


def _written(cache: Path, teacher: str, schema: SignalSchema) -> list[Shard]:
    """What the journals of all ranks note of a teacher, as shards, sorted by their names."""
    header = schema.arrow_schema().serialize().to_pybytes()
    frame = xxhash.xxh3_128_hexdigest(header + END_OF_STREAM)
    shards: dict[str, list[Block]] = {}
    for journal in _journals(cache, teacher):
        for file, block in _noted(cache / teacher, journal):
            shards.setdefault(file, []).append(block)
    return [
        Shard(
            file=file,
            bytes=blocks[-1].offset + blocks[-1].length + len(END_OF_STREAM),
            checksum=frame,
            blocks=blocks,
        )
        for file, blocks in shards.items()
    ]
