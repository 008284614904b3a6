"""The shards and journals of a build: each rank appends blocks to its own.

    TEACHER/shard-FIRST-WRITER.arrow       blocks, one after the other
    .building/TEACHER.WRITER.jsonl         the journal of that shard, one line per block

A rank syncs its shard before it adds the block to the journal, and syncs that too. A block in a
journal survives a power cut; any other block is written again.
"""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path

import pyarrow as pa
import xxhash

from ds_distill.cache.format import END_OF_STREAM, Block, Shard
from ds_distill.cache.plan import BUILDING, Plan
from ds_distill.cache.schema import SignalSchema
from ds_distill.files import new_file, sync


def blocks_to_write(cache: Path, plan: Plan, teacher: str) -> list[int]:
    """Positions in `plan.blocks` of the blocks that are in no journal yet, ascending."""
    numbers = {block.number for blocks in written(cache, teacher).values() for block in blocks}
    return [i for i in range(len(plan.blocks)) if plan.first_block + i not in numbers]


class ShardWriter:
    """Writes one rank's blocks of one teacher."""

    def __init__(
        self, cache: Path, plan: Plan, teacher: str, schema: SignalSchema, writer: str
    ) -> None:
        """
        writer: a name that no other process has, see `writer_name`. A shard that a process of this
            name began, and that has ended, is continued.
        """
        self._journal_file = cache / BUILDING / f"{teacher}.{writer}.jsonl"
        self._file = cache / teacher / f"shard-{plan.first_block:08d}-{writer}.arrow"
        self._first_block = plan.first_block
        blocks = [block for _, block in _read_journal(cache / teacher, self._journal_file)]
        header = _header(schema)
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
    return shards


def close_shard(file: Path, blocks: list[Block], schema: SignalSchema, *, in_use: bool) -> Shard:
    """End a shard's stream behind its blocks, for the manifest.

    in_use: whether its writer may still write. It is copied then, and where another shard has one
        of its blocks: what its writer adds to the old file is in no cache.
    """
    header, end = _header(schema), blocks[-1].offset + blocks[-1].length
    if in_use or len(header) + sum(block.length for block in blocks) != end:
        file, blocks, end = _copy_shard(file, blocks, header)
    else:
        with open(file, "r+b") as opened:
            opened.truncate(end)
            opened.seek(end)
            opened.write(END_OF_STREAM)
            opened.flush()
            os.fsync(opened.fileno())
    return Shard(
        file=file.name,
        bytes=end + len(END_OF_STREAM),
        checksum=xxhash.xxh3_128_hexdigest(header + END_OF_STREAM),
        blocks=blocks,
    )


def _copy_shard(file: Path, blocks: list[Block], header: bytes) -> tuple[Path, list[Block], int]:
    """A new shard of these blocks: its file, they as they stand there, and where the last ends."""
    new, end, copied = file.with_name(f"{file.stem}-copy.arrow"), len(header), []
    with new_file(new) as temporary, open(temporary, "wb") as target, open(file, "rb") as source:
        target.write(header)
        for block in blocks:
            source.seek(block.offset)
            target.write(source.read(block.length))
            copied.append(Block(block.number, block.rows, end, block.length, block.checksum))
            end += block.length
        target.write(END_OF_STREAM)
    return new, copied, end


def _header(schema: SignalSchema) -> bytes:
    """The bytes of a shard before its first block."""
    content: bytes = schema.arrow_schema().serialize().to_pybytes()
    return content
