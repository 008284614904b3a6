"""Floating-point operations that training asks for: those of real tokens and of the head's rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.run.profiler import Amount

_EXAMPLES = 100
"""Of the passes that are counted: what a pass needs but once, such as DeBERTa's relative
positions, becomes small beside them."""


@dataclass(frozen=True)
class ModelFlops:
    """Of a model's passes, as torch's FlopCounterMode counts: two for each multiplication of
    matrix products. They are a sum of four terms, because every layer is the same."""

    per_example: float
    per_token: float
    per_square: float
    """Times the examples' tokens squared: attention."""
    per_row: float
    """Of a masked-LM: each masked token's head."""

    @staticmethod
    def of(model: PlannedModel, *, trains: bool) -> ModelFlops:
        """trains: forward and backward, gradients of all weights; else forward alone."""
        return _model_flops(model, trains)

    def __call__(self, amount: Amount) -> float:
        return (
            self.per_example * amount.examples
            + self.per_token * amount.tokens
            + self.per_square * amount.squares
            + self.per_row * amount.rows
        )


@lru_cache
def _model_flops(model: PlannedModel, trains: bool) -> ModelFlops:
    masked = model.classes is None

    def flops(length: int, rows: int) -> int:
        pass_ = Pass(
            examples=_EXAMPLES,
            length=length,
            rows=rows if masked else None,
            dtype=torch.float32,
            trains=trains,
            fused=False,
            mask_bytes=None,
        )
        return cost(model, pass_).flops

    first, second, third = 16, 32, 48
    one, two, three = (flops(length, _EXAMPLES) / _EXAMPLES for length in (first, second, third))
    # The quadratic through three points.
    square = ((three - two) - (two - one)) / (2 * (second - first) ** 2)
    token = (two - one) / (second - first) - square * (second + first)
    row = (flops(first, 2 * _EXAMPLES) / _EXAMPLES - one) if masked else 0.0
    example = one - token * first - square * first**2 - row
    return ModelFlops(example, token, square, row)
