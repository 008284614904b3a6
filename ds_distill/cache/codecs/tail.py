"""How a tail's mass is spread over the entries that were not kept."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEVELS = 255
_RAREST = 1e-12


@dataclass(frozen=True)
class TailShape:
    """A tail is `prior` raised to a power that each row chooses, scaled to the row's mass.

    One teacher has one prior: how likely each entry is on the average of rows that do not keep
    it. Power 0 is an even spread.
    """

    codes: Tensor
    """uint8 [V]: log prior = -step * code."""
    step: float

    @property
    def log_prior(self) -> Tensor:
        """float32 [V], up to a constant."""
        return self.codes * -self.step

    @staticmethod
    def even(vocabulary: int) -> TailShape:
        return TailShape(torch.zeros(vocabulary, dtype=torch.uint8), 0.0)

    @staticmethod
    def fit(batches: Iterable[Tensor], threshold: float) -> TailShape:
        """The prior of a teacher, from some thousands of its rows.

        batches: float [n, V] logits at the temperature of the cache. threshold: the codec's.
        """
        mass: Tensor | None = None
        for logits in batches:
            probs = torch.softmax(logits.float(), 1)
            outside = probs < threshold
            if mass is None:
                mass = torch.zeros(probs.shape[1], dtype=torch.float64)
                rows = torch.zeros_like(mass)
            mass += probs.masked_fill(~outside, 0.0).sum(0, dtype=torch.float64).cpu()
            rows += outside.sum(0).cpu()
        if mass is None:
            raise ValueError("no logits to fit a tail's shape to")
        mean = torch.where(rows > 0, mass / rows.clamp(min=1), threshold)
        below_first = -torch.log(mean.clamp(min=_RAREST))
        below_first -= below_first.min()
        step = float(below_first.max()) / _LEVELS
        codes = torch.round(below_first / step) if step else torch.zeros_like(below_first)
        return TailShape(codes.to(torch.uint8), step)

    def to_json(self) -> dict[str, Any]:
        codes = base64.b64encode(self.codes.cpu().numpy().tobytes()).decode()
        return {"step": self.step, "codes": codes}

    @staticmethod
    def from_json(values: dict[str, Any]) -> TailShape:
        """Raises ValueError for anything that `to_json` does not give."""
        try:
            codes = base64.b64decode(values["codes"], validate=True)
            step = float(values["step"])
        except (KeyError, TypeError, binascii.Error) as fault:
            raise ValueError(f"a tail's shape needs step and base64 codes: {fault}") from None
        if not 0 <= step < 1000:
            raise ValueError(f"a tail's shape has a step of {step}: it is from 0 to 1000")
        return TailShape(torch.frombuffer(bytearray(codes), dtype=torch.uint8), step)
