"""Seconds of a step. Each kernel takes as long as its matrix product, its traffic to memory or its
launch, whichever is longest, and nothing overlaps. What DeepSpeed 0.19.8 sends at each stage is
what its source says; tests/ci/test_planned_communication.py compares it with its log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from ds_distill.planning.gpus import OF_LINKS, OF_MEMORY, OF_PRODUCTS, Device
from ds_distill.planning.memory import MASTER, MOMENTS, Zero, padded_share
from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.planning.trace import Cost

OF_WEIGHT, OF_TEACHER_LAYER, OF_STUDENT_LAYER = 3, 172, 560
"""What DeepSpeed does in Python, in launches of a kernel: for a trained weight, below stage 3 for
its gradient, and at each stage in the optimizer's step; at stage 3 around a teacher's layer, and
around a student's, which has hooks on every module, forward and backward."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, on each rank."""

    teachers: float = 0.0
    student: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    hooks: float = 0.0
    """DeepSpeed's Python, around each module at stage 3, at each gradient below."""

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def seconds(cost: Cost, device: Device, dtype: torch.dtype) -> float:
    """Of one pass."""
    flops, bandwidth = device.flops(dtype) * OF_PRODUCTS, device.bandwidth * OF_MEMORY
    return sum(
        times * max(operations / flops, moved / bandwidth, device.launch)
        for (operations, moved), times in cost.operations.items()
    )


def pass_seconds(model: PlannedModel, of: Pass, device: Device) -> float:
    """Of a model's pass."""
    return seconds(cost(model, of), device, of.dtype)


def optimizer_seconds(numels: Sequence[int], zero: Zero, device: Device) -> float:
    """Of AdamW on a rank's share: each number is read and written once, gradients are read. A GPU
    may wait for Python.

    numels: elements of each weight.
    """
    share = sum(numels) if zero.stage == 0 else sum(numels) / zero.ranks
    moved = share * (2 * (MASTER + MOMENTS) + 4 + zero.bytes_per_weight)
    of_weights = 0.0 if zero.alone else len(numels) * OF_WEIGHT * device.launch
    return max(of_weights, moved / (device.bandwidth * OF_MEMORY))


def hook_seconds(
    zero: Zero, device: Device, weights: int, student_layers: int, teacher_layers: float
) -> float:
    """Of a step. weights: passes back through a trained weight; layers likewise, of all passes."""
    if zero.alone:
        return 0.0
    if zero.stage < 3:
        return weights * OF_WEIGHT * device.launch
    layers = student_layers * OF_STUDENT_LAYER + teacher_layers * OF_TEACHER_LAYER
    return layers * device.launch


# ------------------------------------------------------------------------------- communication


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in an optimizer step."""

    collective: Literal["all_reduce", "all_gather", "reduce_scatter"]
    bytes: int
    """Of the whole tensors, all calls together: what is reduced, or what has been gathered."""
    calls: float


def sent_in_training(
    groups: Sequence[Sequence[int]],
    frozen: Sequence[int],
    teachers: Mapping[str, Sequence[int]],
    zero: Zero,
    micro_steps: int,
    teacher_passes: float,
) -> list[Sent]:
    """Of an engine that trains a student.

    groups, teachers: as of `memory.training_states`. frozen: elements of each weight of the student
        that is not trained. teacher_passes: how often each live teacher runs in a step; a part of
        once where it reads several steps' texts at once.
    """
    if zero.ranks == 1:
        return []
    trained, size = sum(map(sum, groups)), zero.bytes_per_weight
    buckets = -(-trained // zero.reduce_bucket)
    if zero.stage < 3:
        # Stage 2 reduces, like stage 1, by an all-reduce of which each rank keeps its share
        # (`use_multi_rank_bucket_allreduce`), but in each micro-step.
        times = micro_steps if zero.stage == 2 else 1
        reduced = Sent("all_reduce", times * trained * size, times * buckets)
        if zero.stage == 0:
            return [reduced]
        flat = sum(padded_share(sum(group), zero.ranks) * zero.ranks for group in groups)
        return [reduced, Sent("all_gather", flat * size, len(groups))]
    own = [*(numel for group in groups for numel in group), *frozen]
    reduced = Sent(
        "reduce_scatter",
        micro_steps * _whole((n for group in groups for n in group), zero) * size,
        micro_steps * buckets,
    )
    if zero.student_resident:
        # After the step, weight by weight: what is resident has no buckets.
        gathered = Sent("all_gather", _whole(own, zero) * size, len(own))
    else:
        # Of what a forward pass has run, the backward pass uses the last part again soon enough for
        # DeepSpeed to keep it; the other part is gathered twice.
        whole = _whole(own, zero)
        numel = micro_steps * (whole + max(0, whole - zero.max_reuse // 2))
        calls = -(-numel // zero.prefetch_bucket)
        gathered = Sent("all_gather", numel * size, calls)
    return [reduced, gathered, *sent_by_teachers(teachers, zero, teacher_passes)]


def sent_by_teachers(
    teachers: Mapping[str, Sequence[int]], zero: Zero, passes: float
) -> list[Sent]:
    """To gather sharded teachers, which are released when they have run."""
    if not teachers or zero.stage < 3 or zero.ranks == 1:
        return []
    every = [numel for numels in teachers.values() for numel in numels]
    calls = -(-sum(every) // zero.prefetch_bucket)
    size = _whole(every, zero) * zero.bytes_per_weight
    return [Sent("all_gather", round(passes * size), passes * calls)]


def _whole(numels: Iterable[int], zero: Zero) -> int:
    """Elements of weights that are padded to equal shares."""
    return sum(math.ceil(numel / zero.ranks) * zero.ranks for numel in numels)


def communication_seconds(sent: Iterable[Sent], ranks: int, device: Device) -> float:
    """Of collectives in rings; none runs beside another, or beside computation.

    A ring over several machines crosses between each two of them with every card that they have:
    NCCL makes as many rings.
    """
    on_each = min(ranks, device.per_machine)
    machines = -(-ranks // device.per_machine)
    bandwidth, hops = device.link, (ranks - 1) * device.link_latency
    if machines > 1:
        bandwidth = min(bandwidth, device.network * min(device.cards, on_each))
        hops = (ranks - machines) * device.link_latency + (machines - 1) * device.network_latency
    rate = bandwidth * OF_LINKS
    total = 0.0
    for one in sent:
        rounds = 2 if one.collective == "all_reduce" else 1
        moved = rounds * one.bytes * (ranks - 1) / ranks
        total += moved / rate + one.calls * (rounds * hops + device.launch)
    return total
