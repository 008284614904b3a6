"""Which of a bundle's weights learn, and when: those that an active term reads. The others rest:
neither Adam nor weight decay changes them, and Adam begins with them when a term does."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_distill.models.bundle import Bundle


@dataclass(frozen=True)
class WeightGroup:
    """Weights that the optimizer treats alike."""

    weights: list[nn.Parameter]
    decays: bool
    """Whether they are matrices, which alone have weight decay."""
    learns: tuple[bool, ...]
    """In each stretch of the phase, whether an active term reads them."""


def weight_groups(bundle: Bundle) -> tuple[list[float], list[WeightGroup]]:
    """Where the phase's stretches begin, in shares of its steps from 0 on: in each of them the same
    terms are active. And what is trained, in the optimizer's groups: two of the weights that always
    learn, and two for each way to rest."""
    readers = bundle.readers()
    terms = {term for reading in readers.values() for term in reading}
    edges = {0.0, *(edge for term in terms for edge in (term.settings.start, term.settings.until))}
    starts = sorted(edge for edge in edges if edge < 1.0)
    groups: dict[tuple[bool, tuple[bool, ...]], list[nn.Parameter]] = {}
    for weight, reading in readers.items():
        learns = tuple(any(term.is_active(start) for term in reading) for start in starts)
        groups.setdefault((weight.ndim > 1, learns), []).append(weight)
    order = sorted(groups, reverse=True)  # matrices first
    return starts, [WeightGroup(groups[key], *key) for key in order]


def frozen_weights(bundle: Bundle) -> dict[nn.Parameter, torch.Tensor]:
    """Copies of the students' weights that are not trained, which an engine in bf16 or fp16
    rounds."""
    return {
        weight: weight.detach().clone()
        for student in bundle.students.values()
        for weight in student.parameters()
        if not weight.requires_grad
    }


class Rest:
    """Lets an optimizer's groups rest, each in the stretches in which it does not learn, by taking
    their gradients away before a step: DeepSpeed, like a reduction over ranks, has one of 0 for
    each weight."""

    def __init__(self, optimizer: torch.optim.Optimizer, starts: list[float]) -> None:
        """
        optimizer: each of its groups has `learns`, as `WeightGroup` has it.
        starts: of the stretches, as `weight_groups` gives them.
        """
        self._starts = starts
        # All rest until `at`: at stage 0 in bf16 DeepSpeed makes Adam's states by a step with
        # gradients of 0, in which weights would decay and after which Adam counts one too many.
        self._stretch: int | None = None
        optimizer.register_step_pre_hook(self._take_gradients)

    def at(self, progress: float) -> None:
        """The next step is at this share of the phase."""
        self._stretch = bisect_right(self._starts, progress) - 1

    def _take_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if self._stretch is None or not group["learns"][self._stretch]:
                for weight in group["params"]:
                    weight.grad = None
