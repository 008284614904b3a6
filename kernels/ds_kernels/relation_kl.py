"""KL divergence between self-relations (MiniLM): queries, keys or values with themselves.

The scores are symmetric, so the backward kernel forms one tile and, from the statistics of both
its rows and its columns, the sum of the score gradient and its transpose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._scores import backward_scores, forward_scores
from ._shared import (
    accumulator,
    check_options,
    empty_like_heads,
    forbid_double_backward,
    reduce_losses,
    refuse_transforms,
)
from .attention_kl import check_heads, contiguous_rows, valid_positions


def _forward(
    student: Tensor,
    teacher: Tensor,
    valid: Tensor | None,
    scale_s: float,
    scale_t: float,
    weight: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    return forward_scores(
        student, student, teacher, teacher, valid, scale_s, scale_t, weight, tolerance
    )


def _backward(
    upstream: Tensor,
    student: Tensor,
    teacher: Tensor,
    valid: Tensor | None,
    losses: Tensor,
    stats: Tensor,
    scale_s: float,
    scale_t: float,
    weight: float,
) -> Tensor:
    return backward_scores(
        upstream, student, student, teacher, teacher, valid, losses, stats,
        scale_s, scale_t, weight, symmetric=True,
    )[0]  # fmt: skip


_forward_op = torch.library.custom_op(
    "ds_kernels::relation_kl",
    _forward,
    mutates_args=(),
    schema="(Tensor student, Tensor teacher, Tensor? valid, float scale_s, float scale_t, "
    "float weight, float tolerance) -> (Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "ds_kernels::relation_kl_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor upstream, Tensor student, Tensor teacher, Tensor? valid, Tensor losses, "
    "Tensor stats, float scale_s, float scale_t, float weight) -> Tensor",
)


@_forward_op.register_fake
def _(student: Tensor, teacher: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    acc, shape = accumulator(student, teacher), student.shape[:3]
    return student.new_empty(shape, dtype=acc), student.new_empty((2, *shape), dtype=acc)


@_backward_op.register_fake
def _(upstream: Tensor, student: Tensor, *args: Any) -> Tensor:
    return empty_like_heads(student)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:6]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros of the size of the statistics


def _autograd(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 7
    return (_backward_op(upstream, *ctx.saved_tensors, *ctx.options), *[None] * 6)


_forward_op.register_autograd(_autograd, setup_context=_setup_context)
forbid_double_backward(_backward_op, "relation_kl")


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
    batch, _, length, width = views["student"].shape
    valid = valid_positions(op, mask, batch, length, student.device)
    scale_t = 1 / math.sqrt(views["teacher"].shape[3])
    losses, _ = _forward_op(
        views["student"], views["teacher"], valid, 1 / math.sqrt(width), scale_t, weight, tolerance
    )
    return reduce_losses(losses, valid, batch * length, reduction, heads)
