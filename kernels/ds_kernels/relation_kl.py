"""KL divergence between self-relations (MiniLM): queries, keys or values with themselves.

The scores are symmetric, so the backward kernel forms one tile and, from the statistics of both
its rows and its columns, the sum of the score gradient and its transpose.
"""

from __future__ import annotations

import math

from torch import Tensor

from ._shared import (
    check_options,
    reduce_losses,
    refuse_transforms,
)
from .attention_kl import check_heads, contiguous_rows, scores_op, valid_positions


def relation_kl(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    heads: int,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """KL divergence of self-relations, teacher || student, per relation head and position.

    Row loss = max(weight * KL(softmax(X_t X_t' / sqrt(d_t)) || softmax(X_s X_s' / sqrt(d_s)))
    - tolerance, 0), X the queries, keys or values of one layer, split into relation heads of
    width d: Wang et al. 2021, "MiniLMv2", section 3.1 (sum the calls for the three), and, on
    values with the attention heads, Wang et al. 2020, "MiniLM", section 3.2 (L_VR).

    Args:
        student: [B, S, Ds], all heads side by side; float32, float16 or bfloat16; Ds must be a
            multiple of `heads`, which need not be the number of attention heads.
        teacher: [B, S, Dt], no gradient; Dt a multiple of `heads` too.
        mask: bool [B, S], True = real token, or int64 lengths [B]; None: all are.
        heads: number of relation heads.
        reduction: "none" gives [B, heads, S] with 0 outside the mask; "sum"; "mean" is over
            heads and real tokens.

    Returns:
        Loss in float32; gradients to `student`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, widths that `heads` does not
            divide, heads wider than 256, lengths outside 0 to S (CPU), weight or tolerance
            below 0, an unknown reduction.
        RuntimeError: derivatives that `masked_kl` refuses, too.
    """
    op = "relation_kl"
    check_options(op, weight, tolerance, reduction)
    refuse_transforms(op, student)
    views = {}
    for name, x in (("student", student), ("teacher", teacher.detach())):
        if x.dim() != 3 or heads < 1 or x.shape[2] % heads:
            raise ValueError(
                f"{op}: {name} {list(x.shape)} is no [B, S, D] with D in {heads} heads"
            )
        views[name] = contiguous_rows(x.unflatten(2, (heads, -1)).transpose(1, 2))
    check_heads(op, views)
    batch, _, length, _ = views["student"].shape
    valid = valid_positions(op, mask, batch, length, student.device)
    scales = [1 / math.sqrt(x.shape[3]) for x in views.values()]
    own, other = views.values()
    # The gradient of the first is that of both.
    losses, _ = scores_op(own, own, other, other, valid, *scales, weight, tolerance, True)
    return reduce_losses(losses, valid, batch * length, reduction, heads)
