"""Rows of two classes in place of many labels, label after label: all n examples of the first, then
all of the second. What is fitted of each label is then the same for n rows.

n examples, L labels, K or C classes.
"""

from __future__ import annotations

import torch


def two_classes(logits: torch.Tensor) -> torch.Tensor:
    """[...] -> [..., 2]: a label's logit z as the logits [0, z] of its absence and presence, whose
    softmax is sigmoid(z)."""
    return torch.stack([torch.zeros_like(logits), logits], dim=-1)


def of_rows(of: torch.Tensor, count: int) -> torch.Tensor:
    """What is the same for all `count` rows, [K], or for those of each label, [L, K]: of each row,
    [count, K]."""
    each = of[None] if of.ndim == 1 else of
    return each.repeat_interleave(count // len(each), dim=0)


def times(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Rows [n, K] times a matrix [K, C]; or [L * n, K], those of each label times its own of
    matrices [L, K, C]."""
    if matrix.ndim == 2:
        return rows @ matrix
    return (rows.view(len(matrix), -1, rows.shape[1]) @ matrix).flatten(0, 1)
