"""Seconds of a step, from its operations and a device's speed: each kernel takes as long as its
matrix product, its traffic to memory or its launch, whichever is longest. Nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ds_distill.planning.gpus import Device
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
    hooks: float = 0.0
    """DeepSpeed's, around each module at stage 3, at each gradient below."""

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
    return seconds(cost(model, of), device, of.dtype)


def optimizer_seconds(numels: Sequence[int], zero: Zero, device: Device) -> float:
    """Of AdamW on a rank's share: each number is read and written once, gradients are read. A GPU
    may wait for Python.

    numels: elements of each weight.
    """
    share = sum(numels) if zero.stage == 0 else sum(numels) / zero.ranks
    moved = share * (2 * (MASTER + MOMENTS) + 4 + zero.bytes_per_weight)
    of_weights = len(numels) * device.per_weight
    return max(of_weights, moved / (device.bandwidth * device.achieved_bandwidth))
