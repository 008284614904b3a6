"""KL divergence between attention distributions from queries and keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._scores import backward_scores, forward_scores
from ._shared import (
    accumulator,
    check_floats,
    check_options,
    check_range,
    differentiable,
    empty_like_heads,
    reduce_losses,
    refuse_transforms,
)

MAX_WIDTH = 256  # a head's row is held whole on chip


def check_heads(op: str, named: dict[str, Tensor]) -> None:
    """Raise ValueError unless all are floating [B, A, S, D] on one device with equal B, A, S."""
    first = next(iter(named.values()))
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
    check_floats(op, **named)
    for name, tensor in named.items():
        if tensor.dim() != 4 or tensor.shape[:3] != first.shape[:3] or tensor.shape[3] == 0:
            raise ValueError(f"{op}: {shapes} differ in batch, heads or positions")
        if tensor.shape[3] > MAX_WIDTH:
            raise ValueError(f"{op}: heads of {tensor.shape[3]} in {name}, at most {MAX_WIDTH}")


def valid_positions(
    op: str, mask: Tensor | None, batch: int, length: int, device: torch.device
) -> Tensor | None:
    """bool [B, S] of the real tokens, from such a mask or from lengths [B]."""
    if mask is None:
        return None
    if mask.device != device:
        raise ValueError(f"{op}: mask is on {mask.device}, the inputs are on {device}")
    if mask.dtype == torch.bool and mask.shape == (batch, length):
        return mask
    if mask.dtype in (torch.int32, torch.int64) and mask.shape == (batch,):
        check_range(op, "lengths", mask, length)
        return torch.arange(length, device=device) < mask[:, None]
    raise ValueError(
        f"{op}: mask must be bool [{batch}, {length}] or int64 lengths [{batch}], "
        f"got {mask.dtype} {list(mask.shape)}"
    )


def contiguous_rows(x: Tensor) -> Tensor:
    """The tensor itself where a head's rows are contiguous and within 2^31 elements, or a copy."""
    return x if x.stride(3) == 1 and x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def _outputs(query_s: Tensor, _: Tensor, query_t: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    acc, shape = accumulator(query_s, query_t), query_s.shape[:3]
    return query_s.new_empty(shape, dtype=acc), query_s.new_empty((2, *shape), dtype=acc)


def _gradients(
    upstream: Tensor, losses: Tensor, stats: Tensor, query_s: Tensor, key_s: Tensor, *rest: Any
) -> list[Tensor]:
    symmetric = rest[-1]
    return [empty_like_heads(x) for x in ([query_s] if symmetric else [query_s, key_s])]


scores_op = differentiable(
    "attention_kl",
    "Tensor query_s, Tensor key_s, Tensor query_t, Tensor key_t, Tensor? valid, float scale_s, "
    "float scale_t, float weight, float tolerance, bool symmetric",
    forward_scores,
    backward_scores,
    outputs=_outputs,
    gradients=_gradients,
)


def _scale(given: float | None, query: Tensor) -> float:
    return 1 / math.sqrt(query.shape[3]) if given is None else float(given)


def attention_kl(
    student_query: Tensor,
    student_key: Tensor,
    teacher_query: Tensor,
    teacher_key: Tensor,
    mask: Tensor | None = None,
    *,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """KL divergence of attention distributions, teacher || student, per head and query.

    Row loss = max(weight * KL(softmax(s_t Q_t K_t') || softmax(s_s Q_s K_s'))
    - tolerance, 0): Wang et al. 2020, "MiniLM", section 3.1 (L_AT: the sum over heads and
    positions divided by both numbers).

    Args:
        student_query, student_key: [B, A, S, D], float32, float16 or bfloat16, one dtype;
            any strides.
        teacher_query, teacher_key: [B, A, S, Dt], no gradient. Dt may differ from D.
        mask: bool [B, S], True = real token, or int64 lengths [B]; None: all are. Positions
            outside take part neither as query nor as key, and may hold anything.
        student_scale, teacher_scale: factor of the scores, 1 / sqrt(width) by default.
        reduction: "none" gives [B, A, S] with 0 outside the mask; "sum"; "mean" is over heads
            and real tokens.

    Returns:
        Loss in float32; gradients to student_query and student_key.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, heads wider than 256,
            lengths outside 0 to S (CPU), weight or tolerance below 0, an unknown reduction.
        RuntimeError: derivatives that `masked_kl` refuses, too.
    """
    op = "attention_kl"
    check_options(op, weight, tolerance, reduction)
    named = {"student_query": student_query, "student_key": student_key}
    named |= {"teacher_query": teacher_query, "teacher_key": teacher_key}
    check_heads(op, named)
    for role in ("student", "teacher"):
        query, key = named[f"{role}_query"], named[f"{role}_key"]
        if query.shape != key.shape or query.dtype != key.dtype:
            raise ValueError(
                f"{op}: {role}_query {list(query.shape)} {query.dtype} and {role}_key "
                f"{list(key.shape)} {key.dtype} differ"
            )
    refuse_transforms(op, student_query, student_key)
    batch, heads, length, _ = student_query.shape
    valid = valid_positions(op, mask, batch, length, student_query.device)
    tensors = (student_query, student_key, teacher_query.detach(), teacher_key.detach())
    scales = _scale(student_scale, student_query), _scale(teacher_scale, teacher_query)
    losses, _ = scores_op(*map(contiguous_rows, tensors), valid, *scales, weight, tolerance, False)
    return reduce_losses(losses, valid, batch * length, reduction, heads)
