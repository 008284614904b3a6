"""Size of a cache, and time and memory to build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig

from ds_distill.data.schedule import TOKENS_PER_CALL
from ds_distill.planning.activations import Shape, teacher_work
from ds_distill.planning.communication import communication_seconds, sent_by_teachers
from ds_distill.planning.gpus import Device
from ds_distill.planning.memory import Zero, inference_states
from ds_distill.planning.models import PlannedModel
from ds_distill.planning.roofline import pass_seconds
from ds_distill.planning.split_sizes import SplitFacts
from ds_distill.recipe.codecs import Compact
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import TaskSettings

_KEY = 16
"""Bytes of an example's content key."""

_THRESHOLDS = (5e-4, 1e-3, 2e-3, 4e-3, 1e-2)
_COMPACT = {1.0: (311.0, 187.0, 104.2, 60.8, 36.1), 2.0: (121.1, 50.1, 31.1, 25.5, 23.3)}
"""Bytes per token of `compact` at each threshold, by temperature (docs/studies/codecs.md): of one
teacher and text, so no more than the right order of size."""


@dataclass(frozen=True)
class CachePlan:
    """What a cache phase takes."""

    phase: str
    bytes_per_example: float
    """Of all teachers together."""
    examples: int | None
    bytes: int | None
    """None where the number of examples is not known."""
    examples_per_second: float
    """Of all ranks together, all teachers."""
    build_seconds: float | None
    memory: int
    """Bytes on each rank, of the teacher that takes most."""
    fits: bool


def cache_plan(
    name: str,
    phase: Cache,
    task: TaskSettings,
    teachers: Mapping[str, PlannedModel],
    splits: Sequence[SplitFacts],
    worst: Shape,
    usual: Shape,
    batch: int | None,
    zero: Zero,
    device: Device,
) -> CachePlan:
    """Teachers run one after the other, each alone in memory.

    worst, usual: at the longest length, and at the mean one, which decides the time. batch:
        examples of a pass; None: as many as have TOKENS_PER_CALL.
    """
    longest, batch = (batch or max(1, TOKENS_PER_CALL // shape.length) for shape in (worst, usual))
    most, per_batch = 0, 0.0
    for teacher, model in teachers.items():
        numels = model.numels()
        peak, _ = teacher_work({teacher: model}, worst, longest, None)
        held = inference_states({teacher: numels}, zero)
        most = max(most, held.total + peak.here)
        _, passes = teacher_work({teacher: model}, usual, batch, None)
        per_batch += pass_seconds(model, passes[teacher], device)
        sent = sent_by_teachers({teacher: numels}, zero, passes=1)
        per_batch += communication_seconds(sent, zero.ranks, device)
    rate = zero.ranks * batch / per_batch / task.variants if per_batch else 0.0
    each = sum(
        example_bytes(phase, task, model.config, model.classes, usual.length)
        for model in teachers.values()
    )
    known = [split.examples for split in splits if split.examples is not None]
    examples = sum(known) if len(known) == len(splits) else None
    return CachePlan(
        phase=name,
        bytes_per_example=each + _KEY,
        examples=examples,
        bytes=None if examples is None else round(examples * (each + _KEY)),
        examples_per_second=rate,
        build_seconds=None if examples is None or not rate else examples / rate,
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
