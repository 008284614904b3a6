"""Bytes that each rank holds of weights, gradients and optimizer, by ZeRO stage.

The rules are what DeepSpeed 0.19.8 was seen to hold: tests/ci/test_planned_memory.py
counts the tensors of real engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from ds_distill.engine.config import LAYERS_WHOLE, trains_alone, zero_stage

MASTER, MOMENTS = 4, 8
"""Bytes of an element's fp32 copy in the optimizer, and of AdamW's two moments."""


_KEYS = {
    "reduce_bucket": "reduce_bucket_size",
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "max_live": "stage3_max_live_parameters",
    "max_reuse": "stage3_max_reuse_distance",
}


@dataclass(frozen=True)
class Zero:
    """What of a DeepSpeed config decides about memory."""

    stage: int
    ranks: int
    bytes_per_weight: int
    """Of weights and gradients in the engine: 2 or 4."""
    student_resident: bool = True
    """With stage 3: the student is whole on each rank."""
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    """Elements, as all that follows."""
    max_live: int = 1_000_000_000
    """Of sharded weights that are whole at a time, beside those of the module that runs."""
    max_reuse: int = 1_000_000_000
    """Weights that are used again before so many others stay whole."""
    alone: bool = False
    """Whether the rank has an optimizer of its own, see `trains_alone`."""

    @staticmethod
    def of(
        config: dict[str, Any],
        ranks: int,
        bytes_per_weight: int,
        resident: bool,
        teacher_layer: int = 0,
    ) -> Zero:
        """teacher_layer: elements of the largest layer of the live teachers, by which the engine
        bounds what is whole at a time where the config does not; 0 without."""
        zero = config.get("zero_optimization", {})
        bounds: dict[str, int] = {}
        if teacher_layer:
            whole = LAYERS_WHOLE * teacher_layer
            bounds = {"prefetch_bucket": teacher_layer, "max_live": whole, "max_reuse": whole}
        given = {name: zero.get(key, "auto") for name, key in _KEYS.items()}
        bounds |= {name: int(float(size)) for name, size in given.items() if size != "auto"}
        stage, alone = zero_stage(config), trains_alone(config, ranks)
        return Zero(stage, ranks, bytes_per_weight, resident, **bounds, alone=alone)


@dataclass(frozen=True)
class States:
    """Bytes on the rank that holds most. All but `buffers` is there between steps or, of gradients,
    between the backward pass and the optimizer's step."""

    student: int
    teachers: dict[str, int] = field(default_factory=dict)
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    """What collectives use: gradients that are reduced, and gathered weights."""

    @property
    def total(self) -> int:
        own = self.student + self.gradients + self.optimizer + self.buffers
        return own + sum(self.teachers.values())


def training_states(
    groups: Sequence[Sequence[int]], frozen: int, teachers: Mapping[str, Sequence[int]], zero: Zero
) -> States:
    """Of an engine that trains a student.

    groups: of each of the optimizer's groups the elements of its weights, those of the student and
        of terms. frozen: how many elements are not trained.
    teachers: of each live teacher the elements of its parameters.
    """
    numel, size = sum(map(sum, groups)), zero.bytes_per_weight
    live = inference_states(teachers, zero)
    if zero.stage == 0 or zero.alone:
        flat = MASTER if zero.alone else 0  # gradients in fp32, beside those of a step
        return States(
            (numel + frozen) * size,
            live.teachers,
            gradients=numel * (size + flat),
            optimizer=numel * (MOMENTS + (MASTER if size < 4 else 0)),
            buffers=min(numel, zero.reduce_bucket) * size if zero.ranks > 1 else 0,
        )
    if zero.stage < 3:
        share = sum(padded_share(sum(group), zero.ranks) for group in groups)
        reduced = max(
            sum(_overlapping(group, rank, zero.ranks) for group in groups)
            for rank in range(min(zero.ranks, 1024))
        )
        # The flat copy of what is trained is padded to equal shares.
        held = share * zero.ranks + frozen
        buffers = min(numel, max(zero.reduce_bucket, numel - reduced)) * size
    else:
        share = sum(math.ceil(weight / zero.ranks) for group in groups for weight in group)
        reduced = share
        whole = zero.student_resident and zero.ranks > 1
        held = share + math.ceil(frozen / zero.ranks) + (numel + frozen if whole else 0)
        buffers = min(numel, zero.reduce_bucket) * size + live.buffers
    optimizer = share * (MASTER + MOMENTS)
    return States(held * size, live.teachers, reduced * size, optimizer, buffers)


def inference_states(teachers: Mapping[str, Sequence[int]], zero: Zero) -> States:
    """Of an engine that only runs models forward. Of sharded teachers as many weights are whole at
    a time as the bound allows, and the one that passes it."""
    size, ranks = zero.bytes_per_weight, zero.ranks if zero.stage == 3 else 1
    held = {
        name: sum(math.ceil(numel / ranks) for numel in weights) * size
        for name, weights in teachers.items()
    }
    whole = 0
    if teachers and ranks > 1:
        largest = max(map(max, teachers.values()))
        whole = min(zero.max_live + largest, sum(map(sum, teachers.values())))
    return States(0, held, buffers=whole * size)


def padded_share(numel: int, ranks: int) -> int:
    """A rank's share of a group: DeepSpeed pads groups to a multiple of twice the ranks."""
    return -(-numel // (2 * ranks)) * 2


def _overlapping(group: Sequence[int], rank: int, ranks: int) -> int:
    """Elements of the weights of which a rank has a part: the gradient of a weight across a
    boundary is whole on both sides, because each side has a view of it."""
    share = padded_share(sum(group), ranks)
    first, last = rank * share, (rank + 1) * share
    edges = [0, *accumulate(group)]
    return sum(end - start for start, end in pairwise(edges) if start < last and end > first)
