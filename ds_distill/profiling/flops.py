"""Floating-point operations that training asks for: those of real tokens and of the head's rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.run.observer import Amount

_EXAMPLES = 100
"""Of the passes that are counted: what a pass needs but once, such as DeBERTa's relative
positions, becomes small beside them."""


@lru_cache
def flops_of(model: PlannedModel, trains: bool) -> Callable[[Amount], float]:
    """Of a model's passes, as torch's FlopCounterMode counts: two for each multiplication of matrix
    products. They are a sum of four terms, because every layer is the same: examples, tokens,
    tokens squared (attention) and the rows of a masked-LM's head.

    trains: forward and backward, gradients of all weights; else forward alone.
    """
    masked = model.classes is None

    def flops(length: int, rows: int = _EXAMPLES) -> float:
        own = rows if masked else None
        one = Pass(_EXAMPLES, length, own, torch.float32, trains, fused=False, mask_bytes=None)
        return cost(model, one).flops / _EXAMPLES

    lengths = (16, 32, 48)
    at = np.array([[1, length, length**2] for length in lengths])
    example, token, square = np.linalg.solve(at, [flops(length) for length in lengths])
    row = flops(lengths[0], 2 * _EXAMPLES) - flops(lengths[0]) if masked else 0.0
    return lambda amount: float(
        (example - row) * amount.examples
        + token * amount.tokens
        + square * amount.squares
        + row * amount.rows
    )
