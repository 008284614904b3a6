"""One teacher's blocks: memory-mapped, checked on first touch, gathered from their files."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
import xxhash

from ds_distill.cache.codecs import Encoded
from ds_distill.cache.format import END_OF_STREAM, Block, Shard, Teacher, damaged


class MappedShard:
    """A shard's file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.buffer = _map_file(path)
        self.bytes = memoryview(self.buffer)
        self._items: dict[int, np.ndarray] = {}

    def items(self, size: int) -> np.ndarray:
        """The items of `size` bytes that begin at each offset of the file, one dtype item each.
        An offset beyond the end is an IndexError, as of any array."""
        if size not in self._items:
            shape = (max(0, len(self.bytes) - size + 1),)
            self._items[size] = np.ndarray(shape, f"|V{size}", buffer=self.buffer, strides=(1,))
        return self._items[size]


class _ByShard(NamedTuple):
    """A batch's records, those of a shard together."""

    order: np.ndarray
    """int64 [n]: what puts them so."""
    back: np.ndarray
    """int64 [n]: what undoes it."""
    parts: list[tuple[MappedShard, slice]]


class TeacherBlocks:
    """A teacher's signals by record, as bytes."""

    def __init__(
        self, cache: Path, name: str, teacher: Teacher, block_rows: int, blocks: int
    ) -> None:
        """
        teacher, block_rows, blocks: of a manifest that was read and checked.

        Raises UserError when a shard is missing or of another length than the manifest says.
        """
        self._cache, self._name = cache, name
        self._schema = teacher.signals
        self._arrow_schema = teacher.signals.arrow_schema()
        self._block_rows, self._shift = block_rows, np.uint64(block_rows.bit_length() - 1)
        self._shards = teacher.shards
        self._maps: dict[int, MappedShard] = {}
        found: dict[int, tuple[int, Block]] = {}
        for number, shard in enumerate(teacher.shards):
            file = cache / name / shard.file
            if not file.is_file() or file.stat().st_size != shard.bytes:
                raise self._damaged(shard)
            found |= {block.number: (number, block) for block in shard.blocks}
        self._where = [found[number] for number in range(blocks)]
        self._shard_of = np.array(
            [shard for shard, _ in self._where], dtype=np.min_scalar_type(len(teacher.shards))
        )
        self._rows = np.array([block.rows for _, block in self._where], dtype=np.int64)
        # Where each block's rows end, and that once it was touched: until then no row is there.
        self._ends = (np.arange(blocks) * block_rows + self._rows).astype(np.uint64)
        self._ready = np.zeros(blocks, dtype=np.uint64)
        self._item_bytes = teacher.signals.items

        def offsets() -> dict[str, np.ndarray]:
            return {column: np.zeros(blocks, dtype=np.int64) for column in self._item_bytes}

        # Where in its shard a block's value number 0 lies, or would lie: rows are numbered through
        # all blocks, the values of lists within one. Then the offsets of lists, and of items of
        # any length.
        self._values, self._lists, self._items = offsets(), offsets(), offsets()

    def read(self, indices: np.ndarray) -> dict[str, Encoded]:
        """Each row's item, by column: int64 [n] -> bytes [n, bytes of an item]."""
        blocks = self._blocks_of(indices)
        shards = self._by_shard(blocks)
        columns = {}
        for column, size in self._item_bytes.items():
            assert size is not None  # `_touch` refuses others where there are no lists
            offsets = self._values[column][blocks] + indices * size
            items = self._gather(offsets, size, shards)
            columns[column] = Encoded(torch.from_numpy(items))
        return columns

    def read_lists(self, indices: np.ndarray, variant: int) -> dict[str, Encoded]:
        """Items of each row's list in one mask variant, one list after the other, by column.

        Raises IndexError for a row or variant that is not there.
        """
        if not 0 <= variant < (self._schema.mask_variants or 0):
            raise IndexError("no such mask variant in the cache")
        blocks = self._blocks_of(indices)
        at = variant * self._rows[blocks] + (indices & (self._block_rows - 1))
        shards = self._by_shard(blocks)
        files = [self._maps[shard].bytes for shard in self._shard_of[blocks].tolist()]
        columns = {}
        for column, size in self._item_bytes.items():
            ends = self._gather(self._lists[column][blocks] + 4 * at, 8, shards)
            starts, stops = ends.view(np.int32).astype(np.int64).T
            values = self._values[column][blocks]
            if size is not None:
                payload = _spans(files, values + starts * size, values + stops * size)
                columns[column] = Encoded(torch.from_numpy(payload.reshape(-1, size)))
                continue
            # Items of any length: where each begins and ends stands in offsets of its own, one
            # more than a list has items.
            first = self._items[column][blocks]
            ends = _spans(files, first + 4 * starts, first + 4 * (stops + 1)).view(np.int32)
            last = np.cumsum(stops - starts + 1) - 1
            sizes = np.delete(np.diff(ends), last[:-1])
            begin = last - (stops - starts)
            payload = _spans(files, values + ends[begin], values + ends[last])
            columns[column] = Encoded(
                torch.from_numpy(payload), torch.from_numpy(sizes.astype(np.int64))
            )
        return columns

    def _by_shard(self, blocks: np.ndarray) -> _ByShard:
        shards = self._shard_of[blocks]
        order = np.argsort(shards, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        ends = np.cumsum(np.bincount(shards)).tolist()
        parts = [
            (self._maps[shard], slice(start, end))
            for shard, (start, end) in enumerate(pairwise([0, *ends]))
            if start < end
        ]
        return _ByShard(order, back, parts)

    @staticmethod
    def _gather(offsets: np.ndarray, size: int, shards: _ByShard) -> np.ndarray:
        """Items at offsets int64 [n] of their shards: uint8 [n, size]."""
        if len(shards.parts) == 1:
            items = shards.parts[0][0].items(size)[offsets]
            return items.view(np.uint8).reshape(len(offsets), size)
        ordered = offsets[shards.order]
        items = np.empty(len(offsets), dtype=f"|V{size}")
        for shard, part in shards.parts:
            items[part] = shard.items(size)[ordered[part]]
        return items.view(np.uint8).reshape(len(offsets), size).take(shards.back, axis=0)

    def _blocks_of(self, indices: np.ndarray) -> np.ndarray:
        """Block of each row, all touched. Raises IndexError for a row that is not there."""
        # As unsigned, a negative row is beyond every end. A block's rows are a power of two.
        numbers = indices.view(np.uint64)
        blocks = (numbers >> self._shift).view(np.int64)
        if np.count_nonzero(numbers >= self._ready[blocks]):
            if (numbers >= self._ends[blocks]).any():
                raise IndexError("no such row in the cache")
            for block in np.unique(blocks[self._ready[blocks] == 0]):
                self._touch(int(block))
        return blocks

    def _touch(self, number: int) -> None:
        """Check a block and note where its values lie."""
        shard_number, block = self._where[number]
        shard = self._shards[shard_number]
        message = self._message(shard_number, block)
        if xxhash.xxh3_128_hexdigest(message) != block.checksum:
            raise self._damaged(shard)
        batch = pa.ipc.read_record_batch(message, self._arrow_schema)

        def offset(buffer: pa.Buffer | None) -> int:
            """Where in its shard a buffer begins; 0 for no values."""
            if buffer is None or not buffer.size:
                return 0
            return block.offset + buffer.address - message.address

        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values, size, before = column, self._item_bytes[name], 0
            if self._schema.mask_variants is not None:
                values = column.values
                self._lists[name][number] = offset(column.buffers()[1])
            elif size is not None:
                before = number * self._block_rows * size
            items = values.values if isinstance(values, pa.FixedSizeListArray) else values
            if size is None:
                self._items[name][number] = offset(values.buffers()[1])
            self._values[name][number] = offset(items.buffers()[-1]) - before
        self._ready[number] = self._ends[number]

    def _message(self, number: int, block: Block) -> pa.Buffer:
        """A block's bytes. Raises OSError where the system cannot map the shard: no damage."""
        shard = self._shards[number]
        if number not in self._maps:
            try:
                mapped = MappedShard(self._cache / self._name / shard.file)
            except FileNotFoundError as error:
                raise self._damaged(shard) from error
            # Of threads that come here together all go on with the same one.
            self._maps.setdefault(number, mapped)
        buffer = self._maps[number].buffer
        if buffer.size != shard.bytes:
            raise self._damaged(shard)
        return buffer.slice(block.offset, block.length)

    def verify(self) -> None:
        """Check every byte of every shard. Raises UserError that names the first bad one."""
        for shard in self._shards:
            file = self._cache / self._name / shard.file
            with open(file, "rb") as opened:
                frame = opened.read(shard.blocks[0].offset)
                opened.seek(shard.bytes - len(END_OF_STREAM))
                frame += opened.read()
            if xxhash.xxh3_128_hexdigest(frame) != shard.checksum:
                raise self._damaged(shard)
            for block in shard.blocks:
                self._touch(block.number)

    def _damaged(self, shard: Shard) -> Exception:
        return damaged(self._cache, f"{self._name}/{shard.file}")


def _map_file(path: Path) -> pa.Buffer:
    """A whole file, mapped but not open: a cache may have more shards than a process may open
    files. Raises OSError."""
    with pa.memory_map(str(path)) as source:
        # To read all would ask the kernel for the whole file at once.
        first = source.read_buffer(1)
        return pa.foreign_buffer(first.address, source.size(), base=first)


def _spans(files: Iterable[memoryview], starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Bytes starts[i] to stops[i] of each file, one after the other: uint8."""
    spans = zip(files, starts.tolist(), stops.tolist(), strict=True)
    joined = bytearray().join([file[start:stop] for file, start, stop in spans])
    return np.frombuffer(joined, dtype=np.uint8)
