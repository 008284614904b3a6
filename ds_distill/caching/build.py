"""The teachers' part of a cache build: what it lacks; run a teacher over blocks, and write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ds_distill.cache.build import Build
from ds_distill.cache.build_plan import Plan, block_rows_for
from ds_distill.cache.format import MANIFEST, Teachers
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import EncodedSignals, NotFinite, SignalSchema
from ds_distill.data.batches import Collator, Units, stored_rows
from ds_distill.data.schedule import TOKENS_PER_CALL, cut_by_tokens, pinned_for, prefetch
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.keys import among_keys, distinct_keys
from ds_distill.process.activity import mark
from ds_distill.run.inference import DAMAGED, NotFiniteSignals
from ds_distill.types import Batch, Signals

ATTENTION = "attention"
"""Key of a fingerprint: what computed a teacher's attention. Signals are read whatever computed
them, but signals of other attention are not added to them."""


@dataclass(frozen=True)
class Missing:
    """What a cache lacks of a split."""

    examples: Units
    collate: Collator
    indices: np.ndarray
    """int64: one example for each content key that is missing, in the plan's order."""


def missing_from(
    path: Path,
    splits: list[tuple[Units, Collator]],
    teachers: Teachers,
) -> tuple[Plan, list[Missing]]:
    """What the cache lacks. Raises UserError when the cache that is there is of other
    teachers, or lacks something that this run's attention would compute otherwise."""
    reader = CacheReader(path) if (path / MANIFEST).is_file() else None
    if reader is not None:
        reader.check_same(
            {
                name: (
                    {key: value for key, value in its_fingerprint.items() if key != ATTENTION},
                    schema,
                )
                for name, (its_fingerprint, schema) in teachers.items()
            }
        )
    missing = _distinct(
        splits, lambda keys: np.full(len(keys), True) if reader is None else ~reader.holds(keys)
    )
    count = sum(len(part.indices) for part in missing)
    if reader is not None:
        if count:
            reader.check_same(teachers)
        block_rows, first_block = reader.manifest.block_rows, reader.manifest.blocks
    else:
        tokens = max(float(np.mean(collate.lengths)) for _, collate in splits)
        row_bytes = max(_example_bytes(schema, tokens) for _, schema in teachers.values())
        block_rows, first_block = block_rows_for(count, row_bytes), 0
    keys_by_split = [part.examples.keys.numpy()[part.indices] for part in missing]
    return Plan(first_block, block_rows, keys_by_split), missing


def _distinct(
    splits: list[tuple[Units, Collator]], is_missing: Callable[[np.ndarray], np.ndarray]
) -> list[Missing]:
    """Of each split the examples that are missing and in no split before it.

    is_missing: int64 [n, 2], content keys -> bool [n].
    """
    missing: list[Missing] = []
    seen = np.empty((0, 2), dtype=np.int64)
    for examples, collate in splits:
        keys = examples.keys.numpy()
        first = distinct_keys(keys)  # duplicates share a row
        first = first[is_missing(keys[first])]
        first = first[~among_keys(keys[first], seen)]
        seen = np.concatenate([seen, keys[first]])
        missing.append(_in_order(examples, collate, first))
    return missing


def _in_order(examples: Units, collate: Collator, chosen: np.ndarray) -> Missing:
    """Longest first: one that does not fit in memory fails at once. Ties by key, so that the order
    of the examples in the data does not matter."""
    keys = examples.keys.numpy()[chosen]
    order = np.lexsort((keys[:, 1], keys[:, 0], -collate.lengths[chosen]))
    return Missing(examples, collate, chosen[order])


def _example_bytes(schema: SignalSchema, tokens: float) -> int:
    """About what an example takes: of its tokens some sixth is masked in each mask variant."""
    row = sum(size if size is not None else 64 for size in schema.items.values())
    return (
        row
        if schema.mask_variants is None
        else round(row * schema.mask_variants * max(tokens / 6, 1))
    )


Claim = Callable[[], list[int | None] | None]
"""See `Build.claim`: the same on every rank."""

WAIT_SECONDS = 0.2
"""Interval at which to look whether other processes have written theirs."""


def claims(world: World, build: Build, teacher: str) -> Claim:
    """What the main process claims for all ranks. Every rank must call it equally often."""

    def claim() -> list[int | None] | None:
        # A number for each rank: its position in the plan from 1 on, or 0; and -1 at the end.
        numbers = torch.zeros(world.size, dtype=torch.int64)
        if world.is_main:
            claimed = build.claim(teacher, world.size)
            positions = [-1] if claimed is None else [0 if at is None else at + 1 for at in claimed]
            numbers[:] = torch.tensor(positions)
        found = world.sum(numbers.to(world.device)).tolist()
        return None if found[0] < 0 else [number - 1 if number else None for number in found]

    return claim


def write_blocks(
    engine: Engine,
    build: Build,
    claim: Claim,
    teacher: str,
    missing: list[Missing],
    batch_size: int | None,
    advance: Callable[[list[int]], None],
) -> None:
    """Run a teacher over blocks of a plan, and write this rank's, until all are written. All ranks
    make the same number of calls.

    missing: of each split.
    batch_size: examples per rank and call; None: as many as have TOKENS_PER_CALL tokens.
    advance: called with the blocks that all ranks have done, positions in `plan.blocks`.
    """
    plan, schema = build.plan, build.teachers[teacher][1]
    claimed, block = claim(), _Block()

    def batches(at: int) -> list[np.ndarray]:
        split, part = plan.blocks[at]
        indices, lengths = missing[split].indices[part], missing[split].collate.lengths
        if batch_size is None:
            return cut_by_tokens(indices, lengths, TOKENS_PER_CALL)
        return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]

    def calls() -> Iterator[_Call]:
        """Block after block, while there are any to claim: the next is claimed before the last call
        of the one before, so that its first batch is ready and the device does not wait."""
        nonlocal claimed
        while claimed is not None and any(at is not None for at in claimed):
            yield from _calls(claimed, engine.world.rank, plan, batches, schema.mask_variants or 1)
            claimed = claim()

    def collate(call: _Call) -> tuple[_Call, Batch]:
        batch = missing[call.split].collate(call.examples, call.variant)
        return call, pinned_for(engine.world.device, batch)

    waiting: Future[None] | None = None
    # One thread writes and syncs while the teacher goes on; a block is in flight at most.
    with ThreadPoolExecutor(1) as aside:
        while claimed is not None:
            for call, batch in prefetch(collate, calls()):
                signals = engine.predict(batch, [teacher], schema.hidden)[teacher]
                block.add(call, batch, signals, teacher, schema)
                if call.done:
                    if waiting is not None:
                        waiting.result()
                    if call.block is not None:
                        waiting = aside.submit(_write, build, call, block, teacher)
                    advance(call.done)
                    block = _Block()
            if waiting is not None:
                waiting.result()
            if claimed is not None:  # others write the last ones
                time.sleep(WAIT_SECONDS if waiting is None else 0)
                mark("waits for blocks that other processes write")
                waiting, claimed = None, claim()


@dataclass(frozen=True)
class _Call:
    """A call of the teacher by this rank."""

    block: int | None
    """That it is for, a position in `plan.blocks`; None: this rank has none, and makes the calls of
    the others on empty batches, because ZeRO stage 3 needs it."""
    split: int
    examples: np.ndarray
    """int64 [n]: none where another rank's block takes more calls."""
    variant: int
    done: list[int]
    """The blocks of all ranks that are done after it."""


def _calls(
    claimed: list[int | None],
    rank: int,
    plan: Plan,
    batches: Callable[[int], list[np.ndarray]],
    variants: int,
) -> Iterator[_Call]:
    """This rank's calls for the blocks that the ranks have claimed together."""
    together = [at for at in claimed if at is not None]
    own = claimed[rank]
    split, _ = plan.blocks[together[0] if own is None else own]
    mine = batches(own) if own is not None else []
    most = max(len(batches(at)) for at in together)
    mine += [np.empty(0, dtype=np.int64)] * (most - len(mine))
    for variant in range(variants):
        for number, some in enumerate(mine):
            is_last = variant == variants - 1 and number == most - 1
            yield _Call(own, split, some, variant, together if is_last else [])


class _Block:
    """A block's signals, and with mask variants the number of rows of each variant and example."""

    def __init__(self) -> None:
        self.encoded: list[EncodedSignals] = []
        self._counts: list[np.ndarray] = []

    def add(
        self, call: _Call, batch: Batch, signals: Signals, teacher: str, schema: SignalSchema
    ) -> None:
        rows = stored_rows(batch)  # without the dummy row of a batch of no rows
        if schema.mask_variants is not None and len(call.examples):
            of_rows = batch.views[teacher].example_indices[rows]
            self._counts.append(np.bincount(of_rows.numpy(), minlength=len(call.examples)))
        if len(rows):
            self.encoded.append(schema.encode(signals))

    @property
    def counts(self) -> np.ndarray | None:
        return np.concatenate(self._counts) if self._counts else None


def _write(build: Build, call: _Call, block: _Block, teacher: str) -> None:
    assert call.block is not None
    split, part = build.plan.blocks[call.block]
    keys, counts, schema = build.plan.keys[split][part], block.counts, build.teachers[teacher][1]
    try:
        batch = schema.record_batch(block.encoded, counts)
    except NotFinite as error:
        examples = error.rows
        if counts is not None:  # rows are tokens
            examples = np.searchsorted(np.cumsum(counts), error.rows, side="right") % len(keys)
        bad = torch.from_numpy(keys[np.unique(examples)])
        remedy = DAMAGED
        if error.overflow:
            remedy = f"They are in {schema.dtype} alone: set the cache phase's dtype to float32."
        among = f"{len(keys)} examples of a block"
        raise NotFiniteSignals(teacher, bad, among, remedy) from error
    build.write(teacher, call.block, batch, len(keys))
