"""One teacher's blocks: memory-mapped, checked on first touch, gathered by address."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import xxhash

from ds_distill.cache.codecs import Encoded
from ds_distill.cache.format import END_OF_STREAM, Block, Shard, Teacher, damaged


class _AddressSpace:
    """This process's memory as one array of items of some bytes at any address.

    A batch's rows lie in many blocks of many files. One gather by address takes them all at
    the speed of memory; a gather per block would cost a Python call for each. Every address
    that is asked for comes from a block that is mapped and was checked.
    """

    _ORIGIN = 64  # numpy takes address 0 for no data at all
    _END = 2**48  # of user space on x86-64 and arm64

    def __init__(self, item_bytes: int) -> None:
        self._item_bytes = item_bytes
        # numpy counts an array's bytes, were its items side by side, in 63 bits.
        self._item_wise = item_bytes * self._END < 2**63
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{item_bytes}" if self._item_wise else "|u1",
            "data": (self._ORIGIN, True),
            "shape": (self._END - self._ORIGIN,),
            "strides": (1,),
        }
        self._items = np.asarray(self)

    def take(self, addresses: np.ndarray) -> np.ndarray:
        """Items at int64 places [n]: uint8 [n, bytes of an item]."""
        if self._item_wise:
            return self._items[addresses].view(np.uint8).reshape(len(addresses), self._item_bytes)
        taken = np.empty((len(addresses), self._item_bytes), dtype=np.uint8)
        for item, address in zip(taken, addresses.tolist(), strict=True):
            item[:] = self._items[address : address + self._item_bytes]
        return taken

    @classmethod
    def address(cls, buffer: pa.Buffer) -> int:
        """Where a buffer begins."""
        return int(buffer.address) - cls._ORIGIN


class TeacherBlocks:
    """Rows of a teacher's words, as bytes."""

    def __init__(
        self, cache: Path, name: str, teacher: Teacher, block_rows: int, blocks: int, checks: bool
    ) -> None:
        """
        teacher, block_rows, blocks: of a manifest that was read and checked.
        checks: compare checksums when a block is first touched.

        Raises UserError when a shard is missing or of another length than the manifest says.
        """
        self._cache, self._name = cache, name
        self._schema = teacher.signals
        self._arrow_schema = teacher.signals.arrow_schema()
        self._block_rows, self._shift = block_rows, np.uint64(block_rows.bit_length() - 1)
        self._checks = checks
        self._shards = teacher.shards
        self._maps: dict[int, pa.Buffer] = {}
        address: dict[int, tuple[int, Block]] = {}
        for number, shard in enumerate(teacher.shards):
            file = cache / name / shard.file
            if not file.is_file() or file.stat().st_size != shard.bytes:
                raise self._damaged(shard)
            address |= {block.number: (number, block) for block in shard.blocks}
        self._where = [address[number] for number in range(blocks)]
        self._rows = np.array([block.rows for _, block in self._where], dtype=np.int64)
        # Where each block's rows end, and that once it was touched: until then no row is there.
        self._ends = (np.arange(blocks) * block_rows + self._rows).astype(np.uint64)
        self._ready = np.zeros(blocks, dtype=np.uint64)
        self._item_bytes = teacher.signals.items
        self._fixed = {name: size for name, size in self._item_bytes.items() if size is not None}
        self._space = {size: _AddressSpace(size) for size in {*self._fixed.values(), 1, 8}}

        def addresses() -> dict[str, np.ndarray]:
            return {column: np.zeros(blocks, dtype=np.int64) for column in self._item_bytes}

        # Where a block's value number 0 lies, or would lie: rows are numbered through all blocks,
        # the values of lists within one. Then the offsets of lists, and of items of any length.
        self._values, self._lists, self._items = addresses(), addresses(), addresses()
        # What a read needs of each column, at hand: in a small batch the calls are what costs.
        self._row_columns = [
            (column, size, self._values[column], self._space[size])
            for column, size in self._fixed.items()
        ]

    def has(self, indices: np.ndarray) -> np.ndarray:
        """Whether row numbers int64 [n] are rows of the teacher: bool [n]."""
        blocks = indices // self._block_rows
        known = (indices >= 0) & (blocks < len(self._rows))
        blocks = np.where(known, blocks, 0)
        return known & (indices - blocks * self._block_rows < self._rows[blocks])

    def read(self, indices: np.ndarray) -> dict[str, Encoded]:
        """Each row's item, by column: int64 [n] -> bytes [n, bytes of an item]."""
        blocks = self._blocks_of(indices)
        return {
            column: Encoded(torch.from_numpy(space.take(values[blocks] + indices * size)))
            for column, size, values, space in self._row_columns
        }

    def read_lists(self, indices: np.ndarray, variant: int) -> dict[str, Encoded]:
        """Items of each row's list in one mask draw, one list after the other, by column.

        Raises IndexError for a row or draw that is not there.
        """
        if not 0 <= variant < (self._schema.mask_variants or 0):
            raise IndexError("no such mask draw in the cache")
        blocks = self._blocks_of(indices)
        at = variant * self._rows[blocks] + (indices & (self._block_rows - 1))
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
            addresses = _runs(np.repeat(values, lengths) + first, sizes, 1)
            payload = torch.from_numpy(self._space[1].take(addresses)[:, 0])
            columns[column] = Encoded(payload, torch.from_numpy(sizes))
        return columns

    def _take(self, column: str, addresses: np.ndarray) -> Encoded:
        return Encoded(torch.from_numpy(self._space[self._fixed[column]].take(addresses)))

    def _spans(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and length that Arrow offsets at some places give: int64 [n] each."""
        ends = self._space[8].take(addresses).view(np.int32).astype(np.int64)
        return ends[:, 0], ends[:, 1] - ends[:, 0]

    def _blocks_of(self, indices: np.ndarray) -> np.ndarray:
        """Block of each row, all touched. Raises IndexError for a row that is not there."""
        # As unsigned, a negative row is beyond every end. A block's rows are a power of two.
        numbers = indices.view(np.uint64)
        blocks = (numbers >> self._shift).view(np.int64)
        if np.count_nonzero(numbers >= self._ready[blocks]):
            if (numbers >= self._ends[blocks]).any():
                raise IndexError("no such row in the cache")
            for block in np.unique(blocks[self._ready[blocks] == 0]):
                self._touch(int(block), self._checks)
        return blocks

    def _touch(self, number: int, check: bool) -> None:
        """Check a block and note where its values lie."""
        shard_number, block = self._where[number]
        shard = self._shards[shard_number]
        message = self._message(shard_number, block)
        if check and xxhash.xxh3_128_hexdigest(message) != block.checksum:
            raise self._damaged(shard)
        try:
            batch = pa.ipc.read_record_batch(message, self._arrow_schema)
            batch.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, EOFError) as error:
            raise self._damaged(shard) from error
        if batch.num_rows != block.rows * (self._schema.mask_variants or 1):
            raise self._damaged(shard)
        lists = None
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values = column
            if self._schema.mask_variants is not None:
                if lists is not None and not column.offsets.equals(lists):
                    raise self._damaged(shard)  # columns with different numbers of tokens
                lists, values = column.offsets, column.values
                self._lists[name][number] = self._address(lists.buffers()[1], message, shard)
            if column.null_count or column.offset or values.null_count or values.offset:
                raise self._damaged(shard)
            items = values.values if isinstance(values, pa.FixedSizeListArray) else values
            size = self._item_bytes[name]
            if size is None:
                self._items[name][number] = self._address(values.buffers()[1], message, shard)
            elif len(items) * items.type.byte_width != len(values) * size:
                raise self._damaged(shard)
            if items.null_count or items.offset:
                raise self._damaged(shard)
            address = self._address(items.buffers()[-1], message, shard)
            if lists is None:
                if size is None:  # items of any length are kept in lists alone
                    raise self._damaged(shard)
                address -= number * self._block_rows * size
            self._values[name][number] = address
        self._ready[number] = self._ends[number]

    def _address(self, buffer: pa.Buffer | None, message: pa.Buffer, shard: Shard) -> int:
        """Where an array's values begin, in `_AddressSpace`'s terms; 0 for no values.

        Raises UserError when they are not a part of the block's own bytes: Arrow unpacks
        compressed ones to memory that it frees, and no build compresses.
        """
        if buffer is None or not buffer.size:
            return 0
        before = buffer.address - message.address
        if before < 0 or before + buffer.size > message.size:
            raise self._damaged(shard)
        return _AddressSpace.address(buffer)

    def _message(self, number: int, block: Block) -> pa.Buffer:
        """A block's bytes. Raises OSError where the system cannot map the shard: no damage."""
        shard = self._shards[number]
        if number not in self._maps:
            try:
                mapped = _map_file(self._cache / self._name / shard.file)
            except FileNotFoundError as error:
                raise self._damaged(shard) from error
            # Of threads that come here together all go on with the same one: the addresses that
            # they note must be of a file that stays mapped.
            self._maps.setdefault(number, mapped)
        mapped = self._maps[number]
        if mapped.size != shard.bytes:
            raise self._damaged(shard)
        return mapped.slice(block.offset, block.length)

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
                self._touch(block.number, check=True)

    def _damaged(self, shard: Shard) -> Exception:
        return damaged(self._cache, f"{self._name}/{shard.file}")


def _map_file(path: Path) -> pa.Buffer:
    """A whole file, mapped but not open: a cache may have more shards than a process may open
    files. Raises OSError."""
    with pa.memory_map(str(path)) as source:
        # To read all would ask the kernel for the whole file at once.
        first = source.read_buffer(1)
        return pa.foreign_buffer(first.address, source.size(), base=first)


def _runs(first: np.ndarray, lengths: np.ndarray, step: int) -> np.ndarray:
    """first[i], first[i] + step, ... lengths[i] of them, for each i in turn: int64."""
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    return np.repeat(first, lengths) + within * step
