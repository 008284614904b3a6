"""Codecs of a recipe's masked-LM teachers, fitted for the cache phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ds_distill.cache.codecs import VocabularyCodec
from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.phases import Cache
from ds_distill.run.inference import inference_collator, inference_engine
from ds_distill.run.run import Run

FITTED_ON = 512
"""Examples that a tail's shape is fitted to: some thousands of tokens."""


def codec_json(
    run: Run,
    reference: ModelReference,
    phase: Cache,
    vocabulary: int,
    before: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """A teacher's codec as JSON for the cache's manifest; None for dense logits. Every rank must
    call this; only the main process fits a tail.

    before: the codec of the same teacher in the cache or its unfinished build. Its tail is reused,
        because a new fit could differ by a rounding.
    """
    if phase.codec.runs is None:
        return None
    codec: VocabularyCodec = phase.codec.load().of(phase.codec, vocabulary)
    plain = codec.to_json()
    if not codec.fitted_keys:
        return plain
    unfitted = dict.fromkeys(codec.fitted_keys)
    if before is not None and {**before, **unfitted} == {**plain, **unfitted}:
        return before
    batches = sample_logits(run, reference, phase, FITTED_ON)
    if not run.world.is_main:
        for _ in batches:
            pass
        return plain
    return codec.fit(batches).to_json()


def sample_logits(
    run: Run, reference: ModelReference, phase: Cache, examples: int
) -> Iterator[torch.Tensor]:
    """A teacher's logits at the masked tokens of some examples of the phase's first split:
    float32 [n, V] at the codec's temperature, the same on every rank. Every rank must iterate
    over all of them."""
    split = phase.splits[0]
    collate = inference_collator(run, run.data.examples(split), split, [reference])
    order = np.argsort(-collate.lengths, kind="stable")
    some = order[np.unique(np.linspace(0, len(order) - 1, examples).astype(np.int64))]
    size = phase.batch_size or PADDED_BATCH
    with inference_engine(run, [reference]) as engine:
        for start in range(0, len(some), size):
            batch = collate(some[start : start + size])
            logits = engine.predict(batch, [reference.name])[reference.name].logits
            counted = batch.row_sets["all"].to(logits.device)
            yield logits[counted] / phase.codec.temperature
