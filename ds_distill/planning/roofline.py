"""Seconds of a step, from its operations and a device's speed: each kernel takes as long as its
matrix product, its traffic to memory or its launch, whichever is longest. Nothing overlaps. On a
CPU, which is at hand, models run some layers instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ds_distill.planning.gpus import Device
from ds_distill.planning.measured import measured_optimizer_seconds, measured_seconds
from ds_distill.planning.memory import MASTER, MOMENTS, Zero
from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.planning.trace import Cost


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, on each rank."""

    teachers: float = 0.0
    student: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def seconds(cost: Cost, device: Device, dtype: torch.dtype) -> float:
    """Of one pass."""
    flops = device.flops(dtype) * device.efficiency
    bandwidth = device.bandwidth * device.achieved_bandwidth
    return sum(
        times * max(operations / flops, moved / bandwidth, device.launch)
        for (operations, moved), times in cost.operations.items()
    )


def pass_seconds(model: PlannedModel, of: Pass, device: Device) -> float:
    """Of a model's pass."""
    if device.is_gpu:
        return seconds(cost(model, of), device, of.dtype)
    return measured_seconds(model, of) * device.per_machine  # ranks share the cores


def optimizer_seconds(numels: Sequence[int], zero: Zero, device: Device) -> float:
    """Of AdamW on a rank's share: each number is read and written once, gradients are read.

    numels: elements of each weight.
    """
    if not device.is_gpu:
        dtype = torch.bfloat16 if zero.bytes_per_weight == 2 else torch.float32
        whole = measured_optimizer_seconds(numels, dtype) * device.per_machine
        return whole if zero.stage == 0 else whole / zero.ranks
    share = sum(numels) if zero.stage == 0 else sum(numels) / zero.ranks
    moved = share * (2 * (MASTER + MOMENTS) + 4 + zero.bytes_per_weight)
    return moved / (device.bandwidth * device.achieved_bandwidth)


def communication_seconds(
    trained: int, teachers: int, micro_steps: int, zero: Zero, device: Device
) -> float:
    """Of an optimizer step: gradients are reduced once and weights gathered, in a ring; sharded
    teachers are gathered in each micro-step.

    trained, teachers: elements.
    """
    if zero.ranks == 1:
        return 0.0
    link = device.link if zero.ranks <= device.per_machine else min(device.link, device.network)
    around = (zero.ranks - 1) / zero.ranks * zero.bytes_per_weight
    own = 2 * trained * (micro_steps if zero.stage > 1 else 1)
    gathered = teachers * micro_steps if zero.stage == 3 else 0
    return around * (own + gathered) / (link * device.efficiency)
