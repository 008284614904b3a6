"""What is fitted of each of L labels, for the rows of n examples: n * L of them, example after
example (`Seen.by_label`).

K or C classes.
"""

from __future__ import annotations

import torch


def of_rows(of: torch.Tensor, count: int) -> torch.Tensor:
    """What is the same for all `count` rows, [K], or for those of each label, [L, K]: of each row,
    [count, K]."""
    each = of[None] if of.ndim == 1 else of
    return each.repeat(count // len(each), 1)


def times(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Rows [n, L, K] or [n, 1, K], each label's times its own of matrices [L, K, C]: [n * L, C]."""
    return (rows.transpose(0, 1) @ matrices).transpose(0, 1).flatten(0, 1)
