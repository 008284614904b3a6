"""Two ways to gather a batch's records from a cache's shards: as the reader does, from an array
for each mapped file, and by address, as it once did.

    python tools/benchmarks/cache_gather.py --output tests/results/cache-gather.json

By address, all of this process's memory is one array, and a batch is one gather from it: fewer
calls, and nothing between a wrong number and memory that is none of the cache's. An array of a
file knows where the file ends; it costs a call for each file that a batch has records in, or, for
lists of tokens, for each record.

Class logits: 1M examples of 6 classes. Masked-LM: 20,000 examples of 20 tokens, top 64 and
compact. Batches are at random, all blocks were touched before. The two take turns; a ratio is the
median over rounds, with the least and the largest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_speed import fill, in_turn

from ds_distill.cache.blocks import TeacherBlocks
from ds_distill.cache.codecs import CompactCodec, Encoded, TopKCodec, VocabularyCodec
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import EncodedSignals, SignalSchema
from ds_distill.files import write_json
from ds_distill.run.environment import describe_environment
from ds_distill.types import Signals

VOCABULARY = 30_522
TOKENS = 20
SHARDS = (1, 4, 64)
CALLS, ROUNDS = 200, 30


class AddressSpace:
    """This process's memory as one array of items of some bytes at any address."""

    _ORIGIN = 64  # numpy takes address 0 for no data at all
    _END = 2**48  # of user space on x86-64 and arm64

    def __init__(self, item_bytes: int) -> None:
        self._item_bytes = item_bytes
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{item_bytes}",
            "data": (self._ORIGIN, True),
            "shape": (self._END - self._ORIGIN,),
            "strides": (1,),
        }
        self._items = np.asarray(self)

    def take(self, addresses: np.ndarray) -> np.ndarray:
        """Items at int64 addresses [n]: uint8 [n, bytes of an item]."""
        items = self._items[addresses - self._ORIGIN]
        return items.view(np.uint8).reshape(len(addresses), self._item_bytes)


class BlocksByAddress(TeacherBlocks):
    """The rival: the same blocks and checks, gathered by address."""

    def touch_all(self) -> None:
        for number in range(len(self._rows)):
            self._touch(number, check=False)
        bases = np.array([self._maps[n].buffer.address for n in range(len(self._shards))])
        for offsets in (self._values, self._lists, self._items):
            for column in offsets:
                offsets[column] += bases[self._shard_of]
        sizes = {size for size in self._item_bytes.values() if size is not None}
        self._space = {size: AddressSpace(size) for size in {*sizes, 1, 8}}

    def read(self, indices: np.ndarray) -> dict[str, Encoded]:
        blocks = self._blocks_of(indices)
        return {
            column: Encoded(
                torch.from_numpy(
                    self._space[size].take(self._values[column][blocks] + indices * size)
                )
            )
            for column, size in self._item_bytes.items()
            if size is not None
        }

    def read_lists(self, indices: np.ndarray, variant: int) -> dict[str, Encoded]:
        blocks = self._blocks_of(indices)
        at = variant * self._rows[blocks] + (indices & (self._block_rows - 1))
        columns = {}
        for column, size in self._item_bytes.items():
            starts, lengths = self._extents(self._lists[column][blocks] + 4 * at)
            values = self._values[column][blocks]
            if size is not None:
                addresses = _runs(values + starts * size, lengths, size)
                columns[column] = Encoded(torch.from_numpy(self._space[size].take(addresses)))
                continue
            offsets = _runs(self._items[column][blocks] + 4 * starts, lengths, 4)
            first, sizes = self._extents(offsets)
            addresses = _runs(np.repeat(values, lengths) + first, sizes, 1)
            payload = torch.from_numpy(self._space[1].take(addresses)[:, 0])
            columns[column] = Encoded(payload, torch.from_numpy(sizes))
        return columns

    def _extents(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and length that Arrow offsets at some addresses give: int64 [n] each."""
        ends = self._space[8].take(addresses).view(np.int32).astype(np.int64)
        return ends[:, 0], ends[:, 1] - ends[:, 0]


def _runs(first: np.ndarray, lengths: np.ndarray, step: int) -> np.ndarray:
    """first[i], first[i] + step, ... lengths[i] of them, for each i in turn: int64."""
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    return np.repeat(first, lengths) + within * step


def both_ways(path: Path, keys: np.ndarray, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """Whole reads of a cache's teacher, in each size of batch."""
    ours, rival = CacheReader(path), CacheReader(path)
    manifest = rival.manifest
    blocks = BlocksByAddress(
        path, "teacher", manifest.teachers["teacher"], manifest.block_rows, manifest.blocks, False
    )
    blocks.touch_all()
    rival._blocks["teacher"] = blocks
    rows = ours.indices(torch.from_numpy(keys))
    draw = np.random.default_rng(0)
    _assert_equal(ours, rival, rows[draw.permutation(len(rows))[:5000]])
    measured = []
    for batch in batches:
        chosen = [rows[draw.integers(0, len(rows), batch)] for _ in range(CALLS)]

        def reads(reader: CacheReader, chosen: list[np.ndarray] = chosen) -> Callable[[], None]:
            def run() -> None:
                for part in chosen:
                    reader.read("teacher", part)

            return run

        ratio = in_turn(reads(rival), reads(ours), ROUNDS)
        by_address, by_file = (round(seconds / CALLS * 1e6, 1) for seconds in ratio.pop("seconds"))
        measured.append(
            {"batch": batch, "by_address_us": by_address, "by_file_us": by_file, **ratio}
        )
    return measured


def _assert_equal(ours: CacheReader, rival: CacheReader, rows: np.ndarray) -> None:
    """Also touches all blocks that the rows lie in."""
    first, second = (reader._read("teacher", rows, 0) for reader in (ours, rival))
    for column, encoded in first.items():
        other = second[column]
        assert torch.equal(encoded.payload, other.payload)
        if encoded.lengths is not None:
            assert other.lengths is not None and torch.equal(encoded.lengths, other.lengths)


def class_logits(folder: Path, shards: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    keys = draw.integers(-(2**63), 2**63 - 1, (1_000_000, 2))
    logits = torch.randn(len(keys), 6)
    schema = SignalSchema(dtype="float16", classes=6)
    fill(folder, schema, lambda part: schema.encode(Signals(logits[part])), keys, ranks=shards)
    return both_ways(folder, keys, (32, 256, 1024))


def masked_lm(folder: Path, shards: int, codec: VocabularyCodec) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    keys = draw.integers(-(2**63), 2**63 - 1, (20_000, 2))
    schema = SignalSchema(
        dtype="float16", classes=VOCABULARY, codec=codec.to_json(), temperature=1.0, mask_variants=1
    )
    some = codec.encode(4 * torch.randn(500, VOCABULARY))

    def kept(part: slice) -> EncodedSignals:
        rows = (part.stop - part.start) * TOKENS
        fine = torch.ones(rows, dtype=torch.bool)
        if some.lengths is None:
            encoded = Encoded(some.payload[torch.randint(500, (rows,))])
        else:
            each = some.payload.split(some.lengths.tolist())
            order = torch.randint(500, (rows,))
            encoded = Encoded(torch.cat([each[n] for n in order.tolist()]), some.lengths[order])
        return EncodedSignals({"logits": encoded}, fine, fine)

    fill(folder, schema, kept, keys, each=TOKENS, ranks=shards)
    return both_ways(folder, keys, (32, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS)
    given = parser.parse_args()
    environment = describe_environment(1, "cpu")
    codecs = {
        "top 64": TopKCodec(VOCABULARY, 64),
        "compact": CompactCodec(VOCABULARY, 0.004),
    }
    measured = []
    for shards in given.shards:
        with tempfile.TemporaryDirectory() as name:
            found = {"class logits": class_logits(Path(name) / "logits", shards)}
            for codec, made in codecs.items():
                found[f"masked-LM, {codec}"] = masked_lm(Path(name) / codec, shards, made)
        for kind, rows in found.items():
            for row in rows:
                measured.append({"kind": kind, "shards": shards, **row})
                print(
                    f"{kind}, {shards} shards, batches of {row['batch']}: by address "
                    f"{row['by_address_us']} us, by file {row['by_file_us']} us, "
                    f"{row['ratio']} times {row['ratio_range']}",
                    flush=True,
                )
    if given.output:
        write_json(
            given.output,
            {"environment": environment, "threads": torch.get_num_threads(), "reads": measured},
        )


if __name__ == "__main__":
    main()
