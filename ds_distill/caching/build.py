"""The teachers' part of a cache build: run a teacher over blocks, and write them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ds_distill.cache.build_plan import Plan
from ds_distill.cache.schema import EncodedSignals, NotFinite, SignalSchema
from ds_distill.cache.shards import ShardWriter
from ds_distill.cache.workers import Worker
from ds_distill.caching.missing import Missing
from ds_distill.data.batches import Collator, stored_rows
from ds_distill.data.prefetch import prefetch
from ds_distill.data.schedule import TOKENS_PER_CALL, cut_by_tokens
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.process.activity import mark
from ds_distill.run.not_finite import DAMAGED, NotFiniteSignals

Claim = Callable[[], list[int | None] | None]
"""See `Worker.claim`: the same on every rank."""

WAIT_SECONDS = 0.2
"""Interval at which to look whether other workers go on."""


def claims(world: World, worker: Worker | None, teacher: str) -> Claim:
    """What the main process's worker claims for all ranks. Every rank must call it equally often.

    worker: None on the other ranks.
    """

    def claim() -> list[int | None] | None:
        # A number for each rank: its position in the plan from 1 on, or 0; and -1 at the end.
        numbers = torch.zeros(world.size, dtype=torch.int64)
        if worker is not None:
            claimed = worker.claim(teacher, world.size)
            positions = [-1] if claimed is None else [0 if at is None else at + 1 for at in claimed]
            numbers[:] = torch.tensor(positions)
        found = world.sum(numbers.to(world.device)).tolist()
        return None if found[0] < 0 else [number - 1 if number else None for number in found]

    return claim


def wait(world: World, worker: Worker | None) -> bool:
    """Wait a moment for the other workers. Returns whether there are any. Every rank must call
    this."""
    others = worker.others() if worker is not None else []
    if others:
        time.sleep(WAIT_SECONDS)
    mark("waits for blocks that other workers write")
    return bool(world.sum(torch.full((1,), len(others), device=world.device)).item())


def write_blocks(
    engine: Engine,
    writer: ShardWriter,
    claim: Claim,
    teacher: str,
    schema: SignalSchema,
    plan: Plan,
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
    rank, blocks = engine.world.rank, plan.blocks

    def batches(at: int) -> list[np.ndarray]:
        split, part = blocks[at]
        indices, lengths = missing[split].indices[part], missing[split].collate.lengths
        if batch_size is None:
            return cut_by_tokens(indices, lengths, TOKENS_PER_CALL)
        return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]

    waiting: Future[None] | None = None
    # One thread writes and syncs while the teacher goes on; a block is in flight at most.
    with ThreadPoolExecutor(1) as aside:
        while (claimed := claim()) is not None:
            together = [at for at in claimed if at is not None]
            if waiting is not None and not together:
                waiting.result()
            if not together:  # others write the last ones, or this rank's own thread does
                time.sleep(WAIT_SECONDS if waiting is None else 0)
                mark("waits for blocks that other workers write")
                waiting = None
                continue
            own = claimed[rank]
            split, part = blocks[together[0] if own is None else own]
            # A rank without examples makes the same calls, on empty batches: ZeRO stage 3 needs it.
            mine = batches(own) if own is not None else []
            calls = max(len(batches(at)) for at in together)
            mine += [np.empty(0, dtype=np.int64)] * (calls - len(mine))
            outputs = _run_block(engine, missing[split].collate, mine, teacher, schema)
            if waiting is not None:
                waiting.result()
            if own is not None:
                keys = plan.keys[split][part]
                waiting = aside.submit(_write, writer, own, schema, *outputs, keys, teacher)
            advance(together)
        if waiting is not None:
            waiting.result()


def _run_block(
    engine: Engine,
    collate: Collator,
    batches: list[np.ndarray],
    teacher: str,
    schema: SignalSchema,
) -> tuple[list[EncodedSignals], np.ndarray | None]:
    """A block's signals, and with mask variants the number of rows of each variant and example."""
    encoded: list[EncodedSignals] = []
    counts: list[np.ndarray] = []
    calls = [(some, variant) for variant in range(schema.mask_variants or 1) for some in batches]
    made = prefetch(lambda call: collate(*call), calls)
    for (some, _), batch in zip(calls, made, strict=True):
        signals = engine.predict(batch, [teacher], schema.hidden)[teacher]
        view = batch.views[teacher]
        rows = stored_rows(batch)  # without the dummy row of a batch of no rows
        if schema.mask_variants is not None and len(some):
            of_rows = view.example_indices[rows]
            counts.append(np.bincount(of_rows.numpy(), minlength=len(some)))
        if len(rows):
            encoded.append(schema.encode(signals))
    return encoded, np.concatenate(counts) if counts else None


def _write(
    writer: ShardWriter,
    at: int,
    schema: SignalSchema,
    encoded: list[EncodedSignals],
    counts: np.ndarray | None,
    keys: np.ndarray,
    teacher: str,
) -> None:
    try:
        batch = schema.record_batch(encoded, counts)
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
    writer.append(at, batch, len(keys))
