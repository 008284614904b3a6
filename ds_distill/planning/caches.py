"""Size of a cache, and time and memory to build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from ds_distill.data.schedule import PADDED_BATCH, TOKENS_PER_CALL
from ds_distill.engine.precision import model_dtype
from ds_distill.planning.activations import Shape, run_packed, teacher_memory, teacher_pass
from ds_distill.planning.gpus import Device
from ds_distill.planning.memory import Zero, inference_states
from ds_distill.planning.models import PlannedModel
from ds_distill.planning.plan import CachePlan
from ds_distill.planning.split_sizes import SplitFacts
from ds_distill.planning.times import communication_seconds, pass_seconds, sent_by_teachers
from ds_distill.recipe import Recipe
from ds_distill.recipe.codecs import Compact
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import TaskSettings

_KEY = 16
"""Bytes of an example's content key."""

_THRESHOLDS = (5e-4, 1e-3, 2e-3, 4e-3, 1e-2)
_COMPACT = {1.0: (311.0, 187.0, 104.2, 60.8, 36.1), 2.0: (121.1, 50.1, 31.1, 25.5, 23.3)}
"""Bytes per token of `compact` at each threshold, by temperature (docs/studies/codecs.md): of one
teacher and text, so no more than the right order of size."""


def cache_plan(
    recipe: Recipe,
    name: str,
    phase: Cache,
    teachers: Mapping[str, PlannedModel],
    splits: Sequence[SplitFacts],
    config: dict[str, Any],
    device: Device,
    ranks: int,
) -> CachePlan:
    """Teachers run one after the other, each alone in memory; config: DeepSpeed's."""
    task, dtype = recipe.task_of(phase), model_dtype(config)
    packs = run_packed(recipe, device, teachers, half=dtype.itemsize == 2)
    layer = max((teacher.layer_numel() for teacher in teachers.values()), default=0)
    zero = Zero.of(config, ranks, dtype.itemsize, recipe.student_resident, layer)
    # The longest decide what is held, those of the mean length the time.
    worst, usual = (
        Shape(length, task.row_share, dtype, device.is_gpu)
        for length in (task.max_length, round(max(split.tokens for split in splits)))
    )
    given = phase.batch_size or (None if packs else PADDED_BATCH)
    longest, batch = (given or max(1, TOKENS_PER_CALL // shape.length) for shape in (worst, usual))
    most, per_batch, each = 0, 0.0, float(_KEY)
    for teacher, model in teachers.items():
        numels = {teacher: model.numels()}
        held = (
            inference_states(numels, zero).total + teacher_memory(model, worst, longest, None).here
        )
        most = max(most, held)
        per_batch += pass_seconds(model, teacher_pass(usual, batch, None), device)
        per_batch += communication_seconds(sent_by_teachers(numels, zero, 1), ranks, device)
        each += example_bytes(phase, task, model.config, model.classes, usual.length)
    rate = ranks * batch / per_batch / task.variants
    known = [split.examples for split in splits if split.examples is not None]
    examples = sum(known) if len(known) == len(splits) else None
    return CachePlan(
        phase=name,
        bytes_per_example=each,
        examples=examples,
        bytes=None if examples is None else round(examples * each),
        examples_per_second=rate,
        build_seconds=None if examples is None else examples / rate,
        memory=most,
        fits=most <= device.usable,
    )


def example_bytes(
    phase: Cache, task: TaskSettings, config: PreTrainedConfig, classes: int | None, length: float
) -> float:
    """Of a teacher's signals on one example. classes: None over a vocabulary."""
    size = 4 if phase.dtype == "float32" else 2
    states = len(phase.hidden) * config.hidden_size * size
    rows = 1.0 if task.row_share is None else task.row_share * length * task.variants
    codec = phase.codec
    if task.ragged:
        # Of each window a start and an end, over as many tokens as it may have.
        rows, row = 2.0, float(task.max_length * size)
    elif classes is not None:
        row = float(classes * size)
    elif codec.name == "dense":
        row = float(config.vocab_size * size)
    else:
        nearest = min(_COMPACT, key=lambda known: abs(known - codec.temperature))
        threshold = codec.threshold if isinstance(codec, Compact) else Compact().threshold
        at = np.log([threshold, *_THRESHOLDS])
        row = float(np.interp(at[0], at[1:], _COMPACT[nearest]))
    return (row + states) * rows
