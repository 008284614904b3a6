"""Write a cache on any number of ranks; after a kill at any moment the same call continues.

The records that a cache lacks are cut into blocks, and block b is written by rank b mod the
number of ranks. A rank appends each block to its own shard, syncs the shard, then adds the block
to its journal, and syncs that too. A block in a journal survives a power cut; any other block is
written again. `finish_build` turns the journals into the manifest.

    .building/plan.json                            what is being built (see `plan`)
    .building/TEACHER.RANK-of-RANKS.jsonl          journals, one line per block
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
"""Teachers cannot have this name."""

# --------------------------------------------------------------------------- the main process


@contextmanager
def building(cache: Path) -> Iterator[None]:
    """Lock the cache for one build. Main process. Raises UserError when it is locked."""
    cache.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(cache)
    try:
        yield
    finally:
        (cache / LOCK).unlink(missing_ok=True)
        os.close(descriptor)


def _lock(cache: Path) -> int:
    """Take a lock that ends with this process. Returns the file descriptor that holds it."""
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
        os.close(descriptor)  # a build that has just ended removed this file; try again


def start_build(
    cache: Path, plan: Plan, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]
) -> int:
    """Prepare the folder for the blocks of a plan; blocks of an earlier build of it are reused.

    Main process; the others wait for it. Returns how many blocks, of all teachers together, are
    already written. Raises UserError when an unfinished build has another plan, or its plan is
    damaged.
    """
    folder = cache / BUILDING
    manifest = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
    unfinished = read_plan(cache, manifest)
    if unfinished is not None:
        check_same_plan(cache, unfinished, plan, teachers)
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
    """Add a build whose blocks are all written to the cache. Main process, after the others have
    closed their shards."""
    old = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
    entries = {}
    for name, (fingerprint, schema) in teachers.items():
        shards = _written(cache, name, schema)
        written = {block.number for shard in shards for block in shard.blocks}
        wanted = set(range(plan.first_block, plan.first_block + len(plan.blocks)))
        assert written == wanted, f"blocks {sorted(wanted ^ written)[:5]} of {name}"
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
    """Remove the files of a build that is finished or abandoned. Main process."""
    if (cache / BUILDING).exists():
        shutil.rmtree(cache / BUILDING)
    _remove_leftovers(cache)


def _remove_leftovers(cache: Path) -> None:
    """Remove shards of builds that never finished, and replaced indexes."""
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
    """Cut off a block that is in no journal, and end the stream."""
    end = shard.bytes - len(END_OF_STREAM)
    with open(file, "r+b") as opened:
        opened.truncate(end)
        opened.seek(end)
        opened.write(END_OF_STREAM)
        opened.flush()
        os.fsync(opened.fileno())


# ------------------------------------------------------------------------------- every rank


def known_teachers(cache: Path) -> dict[str, tuple[Fingerprint, SignalSchema]]:
    """The teachers of the unfinished build, else those of the cache, else none.

    Raises UserError when the plan or the cache is damaged, OSError when it cannot be read.
    """
    manifest = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
    unfinished = read_plan(cache, manifest)
    if unfinished is not None:
        return unfinished.teachers
    entries = manifest.teachers if manifest else {}
    return {name: (entry.fingerprint, entry.signals) for name, entry in entries.items()}


def blocks_to_write(cache: Path, plan: Plan, teacher: str, schema: SignalSchema) -> list[int]:
    """Positions in `plan.blocks` of the blocks that no rank has written yet, ascending."""
    numbers = {block.number for shard in _written(cache, teacher, schema) for block in shard.blocks}
    return [i for i in range(len(plan.blocks)) if plan.first_block + i not in numbers]


class ShardWriter:
    """Writes one rank's blocks of one teacher."""

    def __init__(
        self, cache: Path, plan: Plan, teacher: str, schema: SignalSchema, rank: int, ranks: int
    ) -> None:
        """Continues the shard that the same rank, of as many ranks, began, if there is one."""
        suffix = f"{rank:05d}-of-{ranks:05d}"
        self._journal_file = cache / BUILDING / f"{teacher}.{suffix}.jsonl"
        self._file = cache / teacher / f"shard-{plan.first_block:08d}-{suffix}.arrow"
        self._first_block = plan.first_block
        self._schema = schema.arrow_schema()
        blocks = [block for _, block in _read_journal(cache / teacher, self._journal_file)]
        header = self._schema.serialize().to_pybytes()
        self._end = max([block.offset + block.length for block in blocks], default=len(header))
        self._journal_end = sum(len(_line(self._file.name, block)) for block in blocks)
        # Unbuffered: a writer that failed would flush its buffer later, when it is closed, over
        # what another writer has written since.
        mode = "r+" if blocks else "w+"
        self._shard, self._journal = FileIO(self._file, mode), FileIO(self._journal_file, mode)
        self._shard.truncate(self._end)
        self._journal.truncate(self._journal_end)
        if not blocks:
            _write_at(self._shard, header, 0)
            sync(self._file.parent)
            sync(self._journal_file.parent)

    def append(self, position: int, batch: pa.RecordBatch, examples: int) -> None:
        """Write the block at `position` of the plan. After the return it survives a power cut.

        Raises OSError; the blocks written before stay valid, and another writer can continue.
        """
        message = memoryview(batch.serialize())
        _write_at(self._shard, message, self._end)
        os.fdatasync(self._shard.fileno())
        block = Block(
            self._first_block + position,
            examples,
            self._end,
            len(message),
            xxhash.xxh3_128_hexdigest(message),
        )
        line = _line(self._file.name, block)
        _write_at(self._journal, line, self._journal_end)
        os.fdatasync(self._journal.fileno())
        self._end += len(message)
        self._journal_end += len(line)

    def close(self) -> None:
        self._shard.close()
        self._journal.close()


def _write_at(file: FileIO, content: bytes | memoryview, offset: int) -> None:
    rest = memoryview(content)
    while rest:  # one call may write only a part
        written = os.pwrite(file.fileno(), rest, offset)
        rest, offset = rest[written:], offset + written


def _line(file: str, block: Block) -> bytes:
    return json.dumps([file, *block]).encode() + b"\n"


def _read_journal(teacher: Path, journal: Path) -> list[tuple[str, Block]]:
    """The blocks of a journal, each with the name of its shard. A last line that was cut off is
    ignored, and so are blocks beyond the end of the shard, which another process cut off."""
    blocks: list[tuple[str, Block]] = []
    if not journal.is_file():
        return blocks
    sizes: dict[str, int] = {}  # a journal belongs to one shard: one stat call
    for line in journal.read_bytes().splitlines(keepends=True):
        try:
            file, *fields = json.loads(line)
            block = Block(*fields)
            size = sizes.get(file) or (teacher / file).stat().st_size
            sizes[file] = size
        except (ValueError, TypeError, FileNotFoundError):
            break
        if _line(file, block) != line or block.offset + block.length > size:
            break
        blocks.append((file, block))
    return blocks


def _journals(cache: Path, teacher: str) -> list[Path]:
    """The journals of all ranks, sorted. Raises OSError where the folder cannot be listed; a glob
    would silently find none."""
    try:
        names = os.listdir(cache / BUILDING)
    except FileNotFoundError:
        return []
    own = [name for name in names if name.startswith(f"{teacher}.") and name.endswith(".jsonl")]
    return [cache / BUILDING / name for name in sorted(own)]


def _written(cache: Path, teacher: str, schema: SignalSchema) -> list[Shard]:
    """The shards of a teacher by the journals of all ranks, in the order of the journals' names."""
    header = schema.arrow_schema().serialize().to_pybytes()
    frame = xxhash.xxh3_128_hexdigest(header + END_OF_STREAM)
    shards: dict[str, list[Block]] = {}
    for journal in _journals(cache, teacher):
        for file, block in _read_journal(cache / teacher, journal):
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
