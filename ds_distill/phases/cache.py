"""The cache phase: run the teachers once over splits and store their signals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ds_distill.cache.build import Build, known_teachers, remove_leftovers
from ds_distill.cache.format import Teachers
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.caching.build import (
    ATTENTION,
    WAIT_SECONDS,
    Missing,
    claims,
    missing_from,
    write_blocks,
)
from ds_distill.caching.cached_signals import cache_folder, fingerprint
from ds_distill.caching.codecs import codec_json
from ds_distill.caching.fidelity import MUCH, Fidelity, Repeated, fidelity, repeat_inference
from ds_distill.data.batches import Collator, Units
from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.engine.precision import is_half
from ds_distill.engine.world import World
from ds_distill.files import naming
from ds_distill.keys import distinct_keys
from ds_distill.models.configuration import load_config
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.codecs import CODECS
from ds_distill.recipe.phases import Cache
from ds_distill.records import CacheRecord
from ds_distill.run.inference import NotFiniteSignals, inference_collator, inference_engine, refusal
from ds_distill.run.run import Run

LOOK_SECONDS = 5.0
"""A list of all blocks for each of them would take most of the time of a cache of many."""


def cache(phase: Cache, number: int, name: str, run: Run) -> CacheRecord:
    """Write all teachers' signals on the phase's splits, those that the cache lacks."""
    if phase.is_left_out(run.recipe.phases[number + 1 :]):
        run.log.info(f"  {name} is left out: no phase reads it")
        return {"splits": phase.splits, "examples": 0, "added": 0}
    path, world = cache_folder(run, phase, number), run.world
    references = [run.reference(teacher, number) for teacher in run.teachers(number)]
    splits = []
    for split in phase.splits:
        examples = run.data.examples(split)
        splits.append((examples, inference_collator(run, examples, split, references)))
    keys = np.concatenate([some.keys.numpy() for some, _ in splits])
    keys = keys[distinct_keys(keys)]
    rows, folder = len(keys), run.folder.from_here(path)
    record: CacheRecord = {"splits": phase.splits, "folder": folder, "examples": rows, "added": 0}
    if lacking := _not_given(run, references, keys):
        record["not_given"] = lacking
    with naming(path):
        build, missing, kept = _join(phase, run, path, references, splits)
        if build.plan.examples == 0:
            if world.is_main:
                remove_leftovers(path)
            run.log.info(f"  {path} holds all {rows:,} examples")
            return record
        blocks = len(build.plan.blocks) * len(build.teachers)
        if kept:
            run.log.info(f"  {kept} of {blocks} blocks were written before")
        run.log.event("cache", phase=name, blocks=blocks, kept=kept)
        repeated = _write_all(phase, run, references, build, missing)
    reader, near = CacheReader(path), {}
    for teacher, sample in repeated.items():
        measured = fidelity(sample, reader, teacher, many_labels=run.task.many_labels)
        if measured is not None:
            _say_fidelity(run, path, teacher, build.teachers[teacher][1], measured)
            near[teacher] = asdict(measured)
    return {**record, "added": build.plan.examples, "fidelity": near}


def _not_given(run: Run, references: list[ModelReference], keys: np.ndarray) -> dict[str, int]:
    """By teacher from a file: of how many texts it says nothing, where it does not of all."""
    found = {}
    for reference in references:
        if reference.predictions is not None:
            file = run.data.predictions(reference.predictions)
            if lacks := int((file.find(keys) < 0).sum()):
                found[reference.name] = lacks
                run.log.info(f"  {reference.name} says nothing of {lacks:,} of {len(keys):,} texts")
    return found


def _join(
    phase: Cache,
    run: Run,
    path: Path,
    references: list[ModelReference],
    splits: list[tuple[Units, Collator]],
) -> tuple[Build, list[Missing], int]:
    """Begin a build of what the cache lacks, or join the one that goes on. Other processes may
    begin and finish builds at any time: all ranks look again until they have seen the same.

    Returns the build, what is missing of each split, and how many blocks were written before.
    """
    world = run.world
    while True:
        before = known_teachers(path)
        if not _all_see(_described(before), world):
            continue
        teachers = _teachers(phase, run, before, references)
        plan, missing = missing_from(path, splits, teachers)
        if not _all_see(plan.to_json(), world):
            continue
        if plan.examples == 0:
            return Build(path, plan, teachers), missing, 0
        kept = world.from_main(lambda: Build(path, plan, teachers).join())  # noqa: B023
        if kept is not None:
            return Build(path, plan, _known_to_main(path, world)), missing, kept


def _known_to_main(path: Path, world: World) -> Teachers:
    """What rank 0 reads of the build that it has begun or joined: another host may remember for a
    while that there was none."""

    teachers = world.from_main(lambda: _described(known_teachers(path))).items()
    return {name: (mark, SignalSchema.model_validate(of)) for name, (mark, of) in teachers}


def _described(teachers: Teachers) -> dict[str, Any]:
    return {name: [mark, of.model_dump(mode="json")] for name, (mark, of) in teachers.items()}


def _all_see(content: Any, world: World) -> bool:
    """Whether all ranks have read the same from the cache's folder; where they have not, they are
    to read again. Every rank must call this."""
    text = json.dumps(content, sort_keys=True)
    numbers = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    numbers[world.rank] = xxhash.xxh32_intdigest(text.encode())
    same = len(set(world.sum(numbers).tolist())) == 1
    if not same:
        time.sleep(WAIT_SECONDS)
    return same


def _teachers(
    phase: Cache, run: Run, before: Teachers, references: list[ModelReference]
) -> Teachers:
    """Fingerprint and schema of each teacher.

    before: of those that the cache or its unfinished build has; a codec's tail is taken from there.
    """
    teachers = {}
    for reference in references:
        its_fingerprint = fingerprint(run, reference)
        packed = run.packed(reference, half=is_half(run.deepspeed()))
        known, same = before.get(reference.name), None
        if known is not None and known[0].items() >= its_fingerprint.items():
            same = known[1]
        schema = _schema(phase, run, reference, same)
        computed = {} if reference.predictions is not None else {ATTENTION: packed or "padded"}
        teachers[reference.name] = {**its_fingerprint, **computed}, schema
        if packed is not None:
            run.log.info(f"  {reference.name} runs without padding (attention: {packed})")
    return teachers


def _write_all(
    phase: Cache, run: Run, references: list[ModelReference], build: Build, missing: list[Missing]
) -> dict[str, Repeated]:
    """Have all that is missing written, and the build finished. Returns signals of a second run,
    by teacher. Raises UserError where signals are not finite."""
    repeated = {}
    try:
        for reference in references:
            repeated[reference.name] = _run_teacher(phase, run, reference, build, missing)
    except NotFiniteSignals as error:
        raise refusal(run, phase.splits, error) from error
    run.world.barrier()
    if run.world.is_main:
        build.finish()
    run.world.barrier()
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


def _schema(
    phase: Cache, run: Run, reference: ModelReference, before: SignalSchema | None
) -> SignalSchema:
    """before: of the same teacher, in the cache or its unfinished build."""
    stored = before.codec if before else None

    def codec(entries: int) -> dict[str, Any] | None:
        return codec_json(run, reference, phase, entries, stored)

    config = load_config(reference.model, reference.revision)
    config.vocab_size = run.data.taught_tokens([reference]).get(reference.name, config.vocab_size)
    schema = run.kind.signal_schema(phase, config, codec, reference.label_map)
    return schema.model_copy(update={"lacks_rows": reference.predictions is not None})


def _run_teacher(
    phase: Cache, run: Run, reference: ModelReference, build: Build, missing: list[Missing]
) -> Repeated:
    """Have all that is missing of a teacher written, by all ranks and processes together. Returns
    its signals on a few of the examples from a second run."""
    world, teacher = run.world, reference.name
    batch_size = phase.batch_size
    if batch_size is None and run.packed(reference, half=is_half(run.deepspeed())) is None:
        batch_size = PADDED_BATCH
    with inference_engine(run, [reference]) as engine:
        with _progress(run, teacher, build) as advance:
            claim = claims(world, build, teacher)
            write_blocks(engine, build, claim, teacher, missing, batch_size, advance)
        most, schema = max(missing, key=lambda part: len(part.indices)), build.teachers[teacher][1]
        return repeat_inference(
            engine, teacher, most.examples, most.collate, most.indices, schema.mask_variants
        )


@contextmanager
def _progress(run: Run, teacher: str, build: Build) -> Iterator[Callable[[list[int]], None]]:
    """A progress bar over the examples of a teacher that are not written yet, by this process or
    another one: those of others are looked for every LOOK_SECONDS, and an event says how many are
    written, by which a killed phase's time is known."""
    sizes = [part.stop - part.start for _, part in build.plan.blocks]
    left = set(build.left(teacher)) if run.world.is_main else set()
    looked = time.monotonic()
    with run.log.bar(teacher, sum(sizes[at] for at in left)) as bar:

        def advance(done: list[int]) -> None:
            nonlocal looked
            if not run.world.is_main:
                return
            new = left.intersection(done)
            if (now := time.monotonic()) - looked > LOOK_SECONDS:
                looked, new = now, left & {*done, *build.there(teacher)}
                written = sum(sizes) - sum(sizes[at] for at in left - new)
                run.log.event("written", phase=teacher, examples=written)
            left.difference_update(new)
            bar.advance(sum(sizes[at] for at in new))

        yield advance
