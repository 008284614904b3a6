"""Seconds of a step, from its operations and a device's speed: each kernel takes as long as its
matrix product, its traffic to memory or its launch, whichever is longest. Nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ds_distill.planning.gpus import OF_MEMORY, OF_PRODUCTS, Device
from ds_distill.planning.memory import MASTER, MOMENTS, Zero
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
