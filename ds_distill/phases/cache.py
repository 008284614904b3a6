"""The cache phase: run the teachers once over splits and store their signals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_distill.cache.build import (
    ShardWriter,
    blocks_to_write,
    building,
    discard_build,
    finish_build,
    known_teachers,
    start_build,
)
from ds_distill.cache.format import Fingerprint
from ds_distill.cache.plan import Plan
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import EncodedSignals, NotFinite, SignalSchema
from ds_distill.data.batches import Collator
from ds_distill.data.plan import PADDED_BATCH, TOKENS_PER_CALL, cut_by_tokens
from ds_distill.data.prefetch import prefetch
from ds_distill.engine.engine import Engine
from ds_distill.engine.precision import is_bf16
from ds_distill.files import naming, read_json, write_json
from ds_distill.models.configuration import load_config
from ds_distill.parts.codecs import CODECS
from ds_distill.parts.phases import Cache
from ds_distill.phases.cache_missing import ATTENTION, Missing, added_by, missing_from
from ds_distill.run.caches import cache_folder, fingerprint
from ds_distill.run.codecs import codec_json
from ds_distill.run.context import ModelReference, Run
from ds_distill.run.fidelity import MUCH, Fidelity, Repeated, fidelity, repeat_inference
from ds_distill.run.inference import inference_collator, inference_engine
from ds_distill.run.not_finite import DAMAGED, NotFiniteSignals, refusal


def cache(phase: Cache, number: int, name: str, run: Run) -> dict[str, Any]:
    """Write all teachers' signals on the phase's splits, those that the cache lacks."""
    if phase.is_left_out(run.recipe.phases[number + 1 :]):
        run.log.info(f"  {name} is left out: no phase reads it")
        return {"splits": phase.splits, "examples": 0, "added": 0}
    path, world = cache_folder(run, phase, number), run.world
    references = [run.reference(teacher, number) for teacher in run.teachers(number)]
    before = known_teachers(path)
    teachers = {}
    for reference in references:
        its_fingerprint = fingerprint(run, reference)
        packed = run.packed(reference, bf16=is_bf16(run.deepspeed()))
        known = before.get(reference.name)
        same = (
            known[1] if known is not None and {**known[0], **its_fingerprint} == known[0] else None
        )
        schema = _schema(phase, run, reference, same)
        teachers[reference.name] = {**its_fingerprint, ATTENTION: packed or "padded"}, schema
        if packed is not None:
            run.log.info(f"  {reference.name} runs without padding (attention: {packed})")
    splits = []
    for split in phase.splits:
        examples = run.examples(split)
        splits.append((examples, inference_collator(run, examples, split, references)))
    plan, missing = missing_from(path, splits, teachers)
    world.barrier()  # every rank has seen the same cache, before the main process changes it
    rows = len(np.unique(np.concatenate([some.keys.numpy() for some, _ in splits]), axis=0))
    record = {"splits": phase.splits, "folder": _recorded(path, run), "examples": rows}
    notes = run.folder.unfinished(number, name)
    noted = read_json(notes) if notes.is_file() else None
    world.barrier()  # before the main process writes them
    with naming(path), building(path) if world.is_main else nullcontext():
        if plan.examples == 0:
            if world.is_main:
                discard_build(path)
            run.log.info(f"  {path} holds all {rows:,} examples")
            if noted is None:
                return {**record, "added": 0}
            # An earlier start of this phase ended between its last block and its record.
            missing = added_by(path, splits, noted["first_block"])
            run.log.event("cache", phase=name, blocks=noted["blocks"], kept=noted["blocks"])
        else:
            blocks = len(plan.blocks) * len(teachers)
            about = {"first_block": plan.first_block, "blocks": blocks, "added": plan.examples}
            if world.is_main:
                before_it = start_build(path, plan, teachers)
                write_json(notes, about)
                if before_it:
                    run.log.info(f"  {before_it} of {blocks} blocks were written before")
                run.log.event("cache", phase=name, blocks=blocks, kept=before_it)
            noted = about
        world.barrier()
        teachers = known_teachers(path)  # with what the main process alone has fitted
        repeated = _run_teachers(phase, run, references, path, plan, teachers, missing)
        world.barrier()
        if world.is_main and plan.examples:
            finish_build(path, plan, teachers)
        world.barrier()
    reader, near = CacheReader(path), {}
    for teacher, sample in repeated.items():
        measured = fidelity(sample, reader, teacher)
        if measured is not None:
            _say_fidelity(run, path, teacher, teachers[teacher][1], measured)
            near[teacher] = measured.to_json()
    return {**record, "added": noted["added"], "fidelity": near}


def _run_teachers(
    phase: Cache,
    run: Run,
    references: list[ModelReference],
    path: Path,
    plan: Plan,
    teachers: dict[str, tuple[Fingerprint, SignalSchema]],
    missing: list[Missing],
) -> dict[str, Repeated]:
    """Have all that is missing written; see `_run_teacher`. Raises UserError where signals are not
    finite."""
    repeated = {}
    for reference in references:
        schema = teachers[reference.name][1]
        try:
            repeated[reference.name] = _run_teacher(
                run, reference, path, plan, phase.batch_size, schema, missing
            )
        except NotFiniteSignals as error:
            raise refusal(run, phase.splits, error) from error
    return repeated


def _say_fidelity(
    run: Run, path: Path, teacher: str, schema: SignalSchema, measured: Fidelity
) -> None:
    run.log.info(f"  {teacher}: {measured}")
    if measured.lost > MUCH:
        run.log.info(
            f"  WARNING: the cache loses {measured.lost:.0%} of {teacher}'s signals (more than "
            f"{MUCH:.0%} is warned of), and no student can learn that from it. Remove {path} and "
            f"set in the cache phase {CODECS[schema.codec_name].less_loss}."
        )


def _recorded(path: Path, run: Run) -> str:
    """From the run's folder, where it lies in it: that may be moved, and its results published."""
    own = run.folder.path
    return str(path.relative_to(own) if path.is_relative_to(own) else path)


def _schema(
    phase: Cache, run: Run, reference: ModelReference, before: SignalSchema | None
) -> SignalSchema:
    """before: of the same teacher, in the cache or its unfinished build."""
    stored = before.codec if before else None

    def codec(entries: int) -> dict[str, Any] | None:
        return codec_json(run, reference, phase, entries, stored)

    config = load_config(reference.model, reference.revision)
    return run.kind.signal_schema(phase, config, codec, reference.label_map)


def _run_teacher(
    run: Run,
    reference: ModelReference,
    path: Path,
    plan: Plan,
    batch_size: int | None,
    schema: SignalSchema,
    missing: list[Missing],
) -> Repeated:
    """Have all that is missing of a teacher written, by all ranks together. Returns its
    signals on a few of the examples from a second run."""
    world, blocks = run.world, plan.blocks
    # One process reads all journals: hundreds at once would be a burden to a shared file system.
    unwritten = torch.zeros(len(blocks), device=world.device)
    if world.is_main:
        unwritten[blocks_to_write(path, plan, reference.name, schema)] = 1
    todo = world.sum(unwritten).nonzero()[:, 0].tolist()
    rows = sum(blocks[at][1].stop - blocks[at][1].start for at in todo)
    if batch_size is None and run.packed(reference, bf16=is_bf16(run.deepspeed())) is None:
        batch_size = PADDED_BATCH
    with inference_engine(run, [reference]) as engine:
        if todo:
            writer = ShardWriter(path, plan, reference.name, schema, world.rank, world.size)
            with run.log.bar(reference.name, rows) as bar:
                write_blocks(
                    engine,
                    writer,
                    reference.name,
                    schema,
                    plan,
                    todo,
                    missing,
                    batch_size,
                    bar.advance,
                )
            writer.close()
        most = max(missing, key=lambda part: len(part.indices))
        return repeat_inference(
            engine, reference.name, most.examples, most.collate, most.indices, schema.mask_variants
        )


def write_blocks(
    engine: Engine,
    writer: ShardWriter,
    teacher: str,
    schema: SignalSchema,
    plan: Plan,
    todo: list[int],
    missing: list[Missing],
    batch_size: int | None,
    advance: Callable[[int], None],
) -> None:
    """Run a teacher over blocks of a plan, and write this rank's. All ranks make the same number
    of calls.

    todo: positions in `plan.blocks`. missing: of each split.
    batch_size: examples per rank and call; None: as many as have TOKENS_PER_CALL tokens.
    advance: called with how many examples all ranks have done.
    """
    world, blocks = engine.world, plan.blocks
    shares = [
        [at for at in todo if (plan.first_block + at) % world.size == rank]
        for rank in range(world.size)
    ]
    sizes = [part.stop - part.start for _, part in blocks]

    def batches(at: int) -> list[np.ndarray]:
        split, part = blocks[at]
        indices, lengths = missing[split].indices[part], missing[split].collate.lengths
        if batch_size is None:
            return cut_by_tokens(indices, lengths, TOKENS_PER_CALL)
        return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]

    waiting: Future[None] | None = None
    # One thread writes and syncs while the teacher goes on; a block is in flight at most.
    with ThreadPoolExecutor(1) as aside:
        for step in range(max(map(len, shares))):
            together = [share[step] for share in shares if step < len(share)]
            own = shares[world.rank][step] if step < len(shares[world.rank]) else None
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
            advance(sum(sizes[at] for at in together))
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
        if view.positions is not None and len(some):
            # Without the dummy row of a batch of no rows.
            of_rows = view.example_indices[batch.row_sets["all"]]
            counts.append(np.bincount(of_rows.numpy(), minlength=len(some)))
        if len(batch.row_sets["all"]):
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
