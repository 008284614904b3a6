"""The shards and journals of a build: each rank appends blocks to its own.

    TEACHER/shard-BLOCK.arrow                    blocks, one after the other; BLOCK is the first
    .building/workers/NAME/TEACHER.RANK.jsonl    the journal of that shard: its process, then a line
                                                 for each block

A rank syncs its shard before it adds the block to the journal, and syncs that too. A block in a
journal survives a power cut; any other block is written again.

Every file is written by the one process that has made it, with O_EXCL, and no other: what is in a
cache is never opened for writing. The last that a rank writes is the end of its shard's stream.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path

import pyarrow as pa
import xxhash

from ds_distill.cache.build_plan import BUILDING, Plan
from ds_distill.cache.format import END_OF_STREAM, Block, Shard
from ds_distill.cache.schema import SignalSchema
from ds_distill.files import sync
from ds_distill.process.identity import ProcessId

WORKERS = "workers"
"""A folder for each worker, in that of a build."""


def blocks_to_write(cache: Path, plan: Plan, teacher: str) -> list[int]:
    """Positions in `plan.blocks` of the blocks that are in no journal yet, ascending."""
    numbers = {block.number for blocks in written(cache, teacher).values() for block in blocks}
    return [i for i in range(len(plan.blocks)) if plan.first_block + i not in numbers]


class ShardWriter:
    """Writes one rank's blocks of one teacher."""

    def __init__(
        self, cache: Path, plan: Plan, teacher: str, schema: SignalSchema, writer: str
    ) -> None:
        """writer: a name that no other process ever has, see `writer_name`."""
        self._folder, self._first_block = cache / teacher, plan.first_block
        self._journal_file = cache / BUILDING / _worker_journal(teacher, writer)
        self._header = _header(schema)
        self._shard: FileIO | None = None
        self._open: dict[Path, FileIO] = {}
        self._end = self._journal_end = self._blocks = 0

    def append(self, position: int, batch: pa.RecordBatch, examples: int) -> None:
        """Write the block at `position` of the plan. After the return it survives a power cut.
        Nothing is written where the build has ended without this worker, which stood still.

        Raises OSError; the blocks written before stay valid, and another writer can continue.
        """
        if self._shard is None:
            self._shard = self._begin(self._first_block + position)
        if self._shard is None:
            return
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
        self._note(_line(self._file.name, block))
        self._end += len(message)
        self._blocks += 1

    def _begin(self, block: int) -> FileIO | None:
        """Make the files, for a shard that begins with this block. None where the build has ended:
        its workers' folders are gone."""
        try:
            # Unbuffered: a writer that failed would flush its buffer later, when it is closed.
            self._journal = FileIO(self._journal_file, "x")
        except FileNotFoundError:
            return None
        self._open[self._journal_file] = self._journal
        self._file, shard = _new_shard(self._folder, block)
        self._open[self._file] = shard
        _write_at(shard, self._header, 0)
        self._end = len(self._header)
        self._note(json.dumps(asdict(ProcessId.of_this())).encode() + b"\n")
        sync(self._folder)
        sync(self._journal_file.parent)
        return shard

    def _note(self, line: bytes) -> None:
        _write_at(self._journal, line, self._journal_end)
        os.fdatasync(self._journal.fileno())
        self._journal_end += len(line)

    def close(self) -> None:
        """End the shard, which is in the cache as it is then; without a block it is removed."""
        try:
            if self._shard is not None and self._blocks:
                self._shard.truncate(self._end)  # what has failed is behind
                _write_at(self._shard, END_OF_STREAM, self._end)
                os.fdatasync(self._shard.fileno())
        finally:
            for path, file in self._open.items():
                file.close()
                if not self._blocks:
                    path.unlink(missing_ok=True)


def _worker_journal(teacher: str, writer: str) -> str:
    """In the folder of a build. writer: NAME/RANK."""
    worker, _, rank = writer.partition("/")
    return f"{WORKERS}/{worker}/{teacher}.{rank}.jsonl"


def _new_shard(folder: Path, block: int) -> tuple[Path, FileIO]:
    """A new file, that no other process writes. Where a block is written twice, two shards may
    begin with it."""
    number = 0
    while True:
        file = folder / f"shard-{block:08d}{f'-{number}' if number else ''}.arrow"
        with suppress(FileExistsError):
            return file, FileIO(file, "x")
        number += 1


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
        if line.startswith(b"{"):  # the process
            continue
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


def _writer_has_ended(journal: Path) -> bool:
    """Whether the process that wrote a journal has ended for certain."""
    with open(journal, "rb") as file, suppress(ValueError):
        return ProcessId.parse(file.readline()).is_alive() is False
    return False  # a journal of an older version names none


def _journals(cache: Path, teacher: str) -> list[Path]:
    """The journals of all ranks, sorted. Raises OSError where a folder cannot be listed; a glob
    would silently find none."""
    folders = [cache / BUILDING]  # older versions had them there
    with suppress(FileNotFoundError):
        workers = cache / BUILDING / WORKERS
        folders += [workers / name for name in sorted(os.listdir(workers))]
    found = []
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(name for name in os.listdir(folder) if name.endswith(".jsonl"))
            # TEACHER.RANK.jsonl
            found += [folder / name for name in names if name.rsplit(".", 2)[0] == teacher]
    return found


def written(cache: Path, teacher: str) -> dict[str, list[Block]]:
    """The blocks in all journals of a teacher, by shard, in the order of the journals' names. A
    block that was written twice is in the first of them alone."""
    shards: dict[str, list[Block]] = {}
    known: set[int] = set()
    for journal in _journals(cache, teacher):
        for file, block in _read_journal(cache / teacher, journal):
            if block.number not in known:
                known.add(block.number)
                shards.setdefault(file, []).append(block)
    return dict(sorted(shards.items()))


def count_written(cache: Path) -> int:
    """How many blocks the journals of all teachers name, none of which is read; 0 without a
    build."""
    count = 0
    for journal in (cache / BUILDING / WORKERS).glob("*/*.jsonl"):
        with suppress(OSError):  # another worker has ended the build
            count += journal.read_bytes().count(b"\n[")  # behind the line of the process
    return count


def written_to(cache: Path, teacher: str) -> set[str]:
    """The shards of a teacher whose writers may still be there."""
    return {
        file
        for journal in _journals(cache, teacher)
        for file, _ in _read_journal(cache / teacher, journal)[:1]
        if not _writer_has_ended(journal)
    }


def close_shard(file: Path, blocks: list[Block], schema: SignalSchema, *, in_use: bool) -> Shard:
    """A shard whose stream ends behind its blocks, for the manifest: the file as it is, where its
    writer has ended it.

    in_use: whether that writer may still be there. A shard that it has not ended is copied then,
        and one where another shard has one of the blocks: what is added to the old file is in no
        cache.
    """
    header, end = _header(schema), blocks[-1].offset + blocks[-1].length
    if len(header) + sum(block.length for block in blocks) != end:
        file, blocks, end = _copy_shard(file, blocks, header)
    elif not _is_ended(file, end):
        if in_use:
            file, blocks, end = _copy_shard(file, blocks, header)
        else:
            _end_shard(file, end)
    return Shard(
        file=file.name,
        bytes=end + len(END_OF_STREAM),
        checksum=xxhash.xxh3_128_hexdigest(header + END_OF_STREAM),
        blocks=blocks,
    )


def _is_ended(file: Path, end: int) -> bool:
    with open(file, "rb") as opened:
        opened.seek(end)
        return opened.read() == END_OF_STREAM


def _end_shard(file: Path, end: int) -> None:
    """End the stream of a writer that was killed."""
    with open(file, "r+b") as opened:
        opened.truncate(end)
        opened.seek(end)
        opened.write(END_OF_STREAM)
        opened.flush()
        os.fsync(opened.fileno())


def _copy_shard(file: Path, blocks: list[Block], header: bytes) -> tuple[Path, list[Block], int]:
    """A new shard of these blocks: its file, they as they stand there, and where the last ends."""
    end, copied = len(header), []
    new, target = _new_shard(file.parent, blocks[0].number)
    with target, open(file, "rb") as source:
        _write_at(target, header, 0)
        for block in blocks:
            source.seek(block.offset)
            _write_at(target, source.read(block.length), end)
            copied.append(Block(block.number, block.rows, end, block.length, block.checksum))
            end += block.length
        _write_at(target, END_OF_STREAM, end)
        os.fsync(target.fileno())
    return new, copied, end


def _header(schema: SignalSchema) -> bytes:
    """The bytes of a shard before its first block."""
    content: bytes = schema.arrow_schema().serialize().to_pybytes()
    return content
