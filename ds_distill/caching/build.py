"""The teachers' part of a cache build: run a teacher over blocks, and write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ds_distill.cache.build import Build
from ds_distill.cache.build_plan import Plan
from ds_distill.cache.schema import EncodedSignals, NotFinite, SignalSchema
from ds_distill.caching.missing import Missing
from ds_distill.data.batches import stored_rows
from ds_distill.data.prefetch import pinned_for, prefetch
from ds_distill.data.schedule import TOKENS_PER_CALL, cut_by_tokens
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.process.activity import mark
from ds_distill.run.inference import DAMAGED, NotFiniteSignals
from ds_distill.types import Batch, Signals

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
