"""One teacher's blocks: memory-mapped, checked on first touch, gathered by address."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import xxhash

from ds_distill.cache.build import END_OF_STREAM
from ds_distill.cache.codecs import Encoded
from ds_distill.cache.format import MANIFEST, Block, Shard, Teacher, damaged


class _AddressSpace:
    """This process's memory as one array of items of some bytes at any address.

    A batch's rows lie in many blocks of many files. One gather by address takes them all at
    the speed of memory; a gather per block would cost a Python call for each. Every address
    that is asked for comes from a block that is mapped and was checked.
    """

    _ORIGIN = 64  # numpy takes address 0 for no data at all

    def __init__(self, item_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{item_bytes}",
            "data": (self._ORIGIN, True),
            "shape": (2**47,),
            "strides": (1,),
        }
        self._items = np.asarray(self)

    def take(self, places: np.ndarray) -> np.ndarray:
        """Items at int64 places [n]: uint8 [n, bytes of an item]."""
        return self._items[places].view(np.uint8).reshape(len(places), self._items.itemsize)

    @classmethod
    def place(cls, buffer: pa.Buffer | None) -> int:
        """Where a buffer begins; Arrow has none for no values."""
        return int(buffer.address) - cls._ORIGIN if buffer is not None else 0


class TeacherBlocks:
    """Rows of a teacher's words, as bytes."""

    def __init__(
        self, cache: Path, name: str, teacher: Teacher, block_rows: int, blocks: int, checks: bool
    ) -> None:
        """
        block_rows: examples of a block, a power of two.
        blocks: of the cache; the teacher must have every one.
        checks: compare checksums when a block is first touched.

        Raises UserError when a shard is missing or of another length than the manifest says, or
        the manifest is not one that a build writes.
        """
        self._cache, self._name = cache, name
        self._words = teacher.words
        self._schema = teacher.words.arrow_schema()
        self._block_rows, self._shift = block_rows, block_rows.bit_length() - 1
        self._checks = checks
        self._shards = teacher.shards
        self._maps: dict[int, mmap.mmap] = {}
        self._place: list[tuple[int, Block] | None] = [None] * blocks
        if block_rows & (block_rows - 1):
            raise damaged(cache, MANIFEST)
        for number, shard in enumerate(teacher.shards):
            file = cache / name / shard.file
            if not file.is_file() or file.stat().st_size != shard.bytes:
                raise self._damaged(shard)
            for block in shard.blocks:
                if block.number >= blocks or block.rows > block_rows:
                    raise self._damaged(shard)
                self._place[block.number] = (number, block)
        if None in self._place:
            raise damaged(cache, f"{name}: block {self._place.index(None)}")
        self._rows = np.array([place[1].rows for place in self._place if place], dtype=np.int64)
        self._ready = np.zeros(blocks, dtype=np.int64)  # its rows, once a block was touched
        self._item_bytes = teacher.words.items
        self._fixed = {name: size for name, size in self._item_bytes.items() if size is not None}
        self._space = {size: _AddressSpace(size) for size in {*self._fixed.values(), 1, 8}}

        def places() -> dict[str, np.ndarray]:
            return {column: np.zeros(blocks, dtype=np.int64) for column in self._item_bytes}

        # Where a block's values lie, the offsets of its lists, and of items of any length.
        self._values, self._lists, self._items = places(), places(), places()

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Whether row numbers int64 [n] are rows of the teacher: bool [n]."""
        blocks = rows // self._block_rows
        known = (rows >= 0) & (blocks < len(self._rows))
        blocks = np.where(known, blocks, 0)
        return known & (rows - blocks * self._block_rows < self._rows[blocks])

    def read(self, rows: np.ndarray) -> dict[str, Encoded]:
        """Each row's item, by column: int64 [n] -> bytes [n, bytes of an item]."""
        blocks, local = self._locate(rows)
        return {
            column: self._take(column, self._values[column][blocks] + local * size)
            for column, size in self._fixed.items()
        }

    def read_lists(self, rows: np.ndarray, draw: int) -> dict[str, Encoded]:
        """Items of each row's list in one mask draw, one list after the other, by column."""
        blocks, local = self._locate(rows)
        at = draw * self._rows[blocks] + local
        columns = {}
        for column, size in self._item_bytes.items():
            starts, lengths = self._spans(self._lists[column][blocks] + 4 * at)
            values = self._values[column][blocks]
            if size is not None:
                columns[column] = self._take(column, _runs(values + starts * size, lengths, size))
                continue
            # Items of any length: where each begins and ends stands in offsets of its own.
            offsets = _runs(self._items[column][blocks] + 4 * starts, lengths, 4)
            first, sizes = self._spans(offsets)
            places = _runs(np.repeat(values, lengths) + first, sizes, 1)
            payload = torch.from_numpy(self._space[1].take(places)[:, 0])
            columns[column] = Encoded(payload, torch.from_numpy(sizes))
        return columns

    def _take(self, column: str, places: np.ndarray) -> Encoded:
        return Encoded(torch.from_numpy(self._space[self._fixed[column]].take(places)))

    def _spans(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and length that Arrow offsets at some places give: int64 [n] each."""
        ends = self._space[8].take(places).view(np.int32).astype(np.int64)
        return ends[:, 0], ends[:, 1] - ends[:, 0]

    def _locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block of each row, and its place in it, all touched. Raises IndexError for a row that
        is not there."""
        # As unsigned, a negative row is far outside; a block's rows are a power of two.
        blocks = rows.view(np.uint64) >> self._shift
        local = rows & (self._block_rows - 1)
        if not (local < self._ready[blocks]).all():
            if not (local < self._rows[blocks]).all():
                raise IndexError("no such row in the cache")
            for block in np.unique(blocks[self._ready[blocks] == 0]):
                self._touch(int(block))
        return blocks, local

    def _touch(self, number: int) -> None:
        """Check a block and note where its values lie."""
        place = self._place[number]
        assert place is not None
        shard = self._shards[place[0]]
        message = self._message(place[0], place[1])
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(message), self._schema)
            batch.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(shard) from error
        if batch.num_rows != place[1].rows * (self._words.draws or 1):
            raise self._damaged(shard)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values = column
            if self._words.draws is not None:
                self._lists[name][number] = _AddressSpace.place(column.buffers()[1])
                values = column.values
            if pa.types.is_binary(values.type):
                self._items[name][number] = _AddressSpace.place(values.buffers()[1])
            if column.null_count or column.offset or values.null_count or values.offset:
                raise self._damaged(shard)
            if isinstance(values, pa.FixedSizeListArray):
                values = values.values
                if values.null_count or values.offset:
                    raise self._damaged(shard)
            self._values[name][number] = _AddressSpace.place(values.buffers()[-1])
        self._ready[number] = place[1].rows

    def _message(self, number: int, block: Block) -> memoryview:
        """A block's bytes, checked."""
        shard = self._shards[number]
        if number not in self._maps:
            with open(self._cache / self._name / shard.file, "rb") as file:
                self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        message = memoryview(self._maps[number])[block.offset : block.offset + block.length]
        if self._checks and xxhash.xxh3_128_hexdigest(message) != block.checksum:
            raise self._damaged(shard)
        return message

    def verify(self) -> None:
        """Check every byte of every shard. Raises UserError that names the first bad one."""
        for number, shard in enumerate(self._shards):
            file = self._cache / self._name / shard.file
            size = sum(block.length for block in shard.blocks)
            header = shard.bytes - size - len(END_OF_STREAM)
            with open(file, "rb") as opened:
                frame = opened.read(max(header, 0))
                opened.seek(max(shard.bytes - len(END_OF_STREAM), 0))
                frame += opened.read()
            if xxhash.xxh3_128_hexdigest(frame) != shard.checksum:
                raise self._damaged(shard)
            for block in shard.blocks:
                self._message(number, block)
                self._touch(block.number)

    def _damaged(self, shard: Shard) -> Exception:
        return damaged(self._cache, f"{self._name}/{shard.file}")


def _runs(first: np.ndarray, lengths: np.ndarray, step: int) -> np.ndarray:
    """first[i], first[i] + step, ... lengths[i] of them, for each i in turn: int64."""
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    return np.repeat(first, lengths) + within * step
