"""AdamW of a rank that trains alone, where ZeRO has nothing to shard: a group's weights are one
tensor.

Weight by weight, the optimizer, the norm of the gradients and DeepSpeed's hooks take as much Python
as a small student's passes (docs/studies/speed.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")

ALIGNED = 16
"""Numbers: a GPU's matrix products are slow on weights that begin within 16 bytes. What lies
between two weights is 0, and stays so."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Weights whose numbers lie in one tensor."""

    weights: Sequence[nn.Parameter]
    here: torch.Tensor
    """In the model's dtype: the weights are views of it."""
    master: torch.Tensor
    """In float32, which AdamW updates: itself in fp32, else a copy."""
    gradient: torch.Tensor
    """In float32."""
    gradients: Sequence[torch.Tensor]
    """Views of it, one a weight."""

    @staticmethod
    def of(weights: Sequence[nn.Parameter]) -> _Group:
        first = weights[0]
        *_, (_, last) = _parts(weights)
        here = torch.zeros(last.stop, dtype=first.dtype, device=first.device)
        for weight, part in _parts(weights):
            view = here[part].view_as(weight)
            view.copy_(weight.detach())
            weight.data = view
        gradient = torch.zeros_like(here, dtype=torch.float32)
        gradients = [gradient[part].view_as(weight) for weight, part in _parts(weights)]
        return _Group(weights, here, here.float(), gradient, gradients)

    def take_gradients(self) -> None:
        """A weight that a loss reaches on no path has one of 0, with which AdamW decays it as it
        does on more ranks."""
        views, found = [], []
        for view, weight in zip(self.gradients, self.weights, strict=True):
            if weight.grad is not None:
                views.append(view)
                found.append(weight.grad)
        if len(found) < len(self.weights):
            self.gradient.zero_()
        if found:
            torch._foreach_copy_(views, found)
        self.master.grad = self.gradient


def _parts(weights: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, slice]]:
    """Where each weight's numbers are, each at a multiple of ALIGNED."""
    start = 0
    for weight in weights:
        yield weight, slice(start, start + weight.numel())
        start += -(-weight.numel() // ALIGNED) * ALIGNED


class FlatAdamW:
    """What DeepSpeed calls of an optimizer."""

    def __init__(
        self,
        adamw: torch.optim.AdamW,
        groups: Sequence[Sequence[nn.Parameter]],
        max_norm: float,
        *,
        looks: bool,
    ) -> None:
        """
        adamw: gets these groups in place of its own; it has made no step.
        groups: its weights, where they will stay.
        max_norm: of all gradients together; 0 for any.
        looks: whether a step with a gradient that is not finite is skipped, for which Python waits.
        """
        self.optimizer, self._max_norm, self._looks = adamw, max_norm, looks
        self._groups = [_Group.of(weights) for weights in groups]
        for own, group in zip(adamw.param_groups, self._groups, strict=True):
            own["params"] = [group.master]
        adamw.state.clear()
        self._places = {
            weight: (group, part)
            for group in self._groups
            for weight, part in _parts(group.weights)
        }
        self.overflow = False
        """Whether the last step was skipped."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for group in self._groups:
            group.take_gradients()
        norms = [torch.linalg.vector_norm(group.gradient) for group in self._groups]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self._global_grad_norm = norm  # DeepSpeed's name of it
        self.overflow = self._looks and not math.isfinite(norm)
        if self.overflow:
            return
        if self._max_norm:
            factor = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch clips
            for group in self._groups:
                group.gradient.mul_(factor)
        self.optimizer.step()
        for group in self._groups:
            if group.master is not group.here:
                group.here.copy_(group.master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self._groups:
            for weight in group.weights:
                weight.grad = None

    # ------------------------------------------------------------------- checkpoints

    def masters(self) -> dict[nn.Parameter, torch.Tensor]:
        """Of each weight the float32 numbers that AdamW updates: views."""
        return {
            weight: group.master[part].view_as(weight)
            for weight, (group, part) in self._places.items()
        }

    def state_of(self, weight: nn.Parameter) -> dict[str, torch.Tensor]:
        """Moments and `step` of a weight; nothing before AdamW's first update."""
        group, part = self._places[weight]
        state = self.optimizer.state.get(group.master)
        if not state:
            return {}
        moments = {key: state[key][part].view_as(weight) for key in MOMENTS}
        return {**moments, "step": state["step"]}

    @torch.no_grad()
    def set_state(self, weight: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """What `state_of` gives, of each weight of a group."""
        group, part = self._places[weight]
        own = self.optimizer.state[group.master]
        for key in MOMENTS:
            own.setdefault(key, torch.zeros_like(group.master))[part] = state[key].flatten()
        own["step"] = state["step"]
