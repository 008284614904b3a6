"""KL divergence on the teacher's K largest log-probabilities and one bucket for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from ._shared import (
    check_floats,
    check_options,
    check_range,
    differentiable,
    flat_rows,
    like_student,
    reduce_rows,
    refuse_transforms,
    row_stride,
)
from ._topk import backward_topk, forward_topk, topk_outputs

_op = differentiable(
    "topk_kl",
    "Tensor student, Tensor log_probs, Tensor ids, Tensor tail, Tensor? rows, float temperature, "
    "float weight, float tolerance",
    forward_topk,
    backward_topk,
    outputs=topk_outputs,
    gradients=like_student,
)


def _check_inputs(
    op: str,
    student_logits: Tensor,
    teacher_log_probs: Tensor,
    teacher_ids: Tensor,
    teacher_tail_log_prob: Tensor,
) -> None:
    """Raises ValueError on shapes, dtypes or devices that do not fit."""
    lead = student_logits.shape[:-1]
    if (
        student_logits.dim() < 1
        or student_logits.shape[-1] == 0
        or teacher_ids.dim() != student_logits.dim()
        or teacher_ids.shape[:-1] != lead
        or teacher_ids.shape[-1] == 0
        or teacher_log_probs.shape != teacher_ids.shape
        or teacher_tail_log_prob.shape != lead
    ):
        raise ValueError(
            f"{op}: student_logits {list(student_logits.shape)}, teacher_log_probs "
            f"{list(teacher_log_probs.shape)}, teacher_ids {list(teacher_ids.shape)} and "
            f"teacher_tail_log_prob {list(teacher_tail_log_prob.shape)} do not fit; "
            "[..., V], [..., K], [..., K] and [...] wanted"
        )
    check_floats(
        op,
        student_logits=student_logits,
        teacher_log_probs=teacher_log_probs,
        teacher_tail_log_prob=teacher_tail_log_prob,
    )
    if teacher_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{op}: teacher_ids has dtype {teacher_ids.dtype}; int64 or int32 wanted")
    if teacher_ids.device != student_logits.device:
        raise ValueError(f"{op}: teacher_ids is on {teacher_ids.device}")


def topk_kl(
    student_logits: Tensor,
    teacher_log_probs: Tensor,
    teacher_ids: Tensor,
    teacher_tail_log_prob: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """KL divergence from a teacher's K stored probabilities and tail to the student, K + 1 buckets.

    Row loss = max(weight * T^2 * (sum_k p_k log(p_k / q_k) + p_r log(p_r / q_r)) - tolerance, 0):
    p is the teacher's, its K entries and tail renormalised in float32; q = softmax(student / T);
    p_r and q_r are the masses outside the K columns. This is Hinton et al. 2015, section 2, on a
    coarser partition, so it is never above the full KL divergence.

    Args:
        student_logits: [..., V], float32, float16 or bfloat16.
        teacher_log_probs: [..., K], any of these dtypes, taken at `temperature`.
        teacher_ids: [..., K], int64 or int32, columns of the student, distinct in a counted
            row; -1 pads.
        teacher_tail_log_prob: [...], log of the teacher's mass outside K, -inf if there is none.
        mask, reduction: as in `masked_kl`.

    Returns:
        Loss in float32, gradients to the student only. On a GPU an id of V or more, or one that
        stands twice in a row, makes the row's loss infinite: raising would wait for the device.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, ids or row indices out of range,
            an id that stands twice in a row (CPU), temperature <= 0, weight or tolerance
            below 0, an unknown reduction.
        RuntimeError: derivatives that `masked_kl` refuses, too.
    """
    op = "topk_kl"
    check_options(op, weight, tolerance, reduction, temperature)
    refuse_transforms(op, student_logits)
    _check_inputs(op, student_logits, teacher_log_probs, teacher_ids, teacher_tail_log_prob)
    lead = student_logits.shape[:-1]
    width, num_entries = student_logits.shape[-1], teacher_ids.shape[-1]
    check_range(op, "teacher_ids", teacher_ids, width - 1, least=-1)
    rows = flat_rows(op, mask, lead, student_logits.device)
    losses, _ = _op(
        row_stride(student_logits.reshape(-1, width)),
        teacher_log_probs.detach().reshape(-1, num_entries).contiguous(),
        teacher_ids.reshape(-1, num_entries).contiguous(),
        teacher_tail_log_prob.detach().reshape(-1).contiguous(),
        rows, temperature, weight, tolerance,
    )  # fmt: skip
    return reduce_rows(losses, rows, lead, reduction)
