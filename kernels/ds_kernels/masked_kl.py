"""Divergences between teacher and student logits over counted rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._divergences import DIVERGENCES, KL, MSE
from ._rows import backward_rows, forward_rows, gradient_factor, row_outputs
from ._shared import (
    accumulator,
    check_choice,
    check_options,
    check_pair,
    differentiable,
    flat_rows,
    indices,
    like_student,
    note_path,
    reduce_rows,
    refuse_transforms,
    row_stride,
)

_op = differentiable(
    "masked_kl",
    "Tensor student, Tensor teacher, Tensor? rows, float temperature, float weight, "
    "float tolerance, int divergence",
    forward_rows,
    backward_rows,
    outputs=row_outputs,
    gradients=like_student,
)

FEW = 1 << 16
"""Logits up to which launching the kernels takes longer than PyTorch's own operations do."""


class _Plain(torch.autograd.Function):
    """Row losses [N] of KL by PyTorch's own operations, as few of them as can be: for class logits,
    where their number is all that counts. No device synchronisation."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        keep: Tensor | None,
        temperature: float,
        weight: float,
        tolerance: float,
    ) -> Tensor:
        acc = accumulator(student, teacher)
        if temperature != 1.0:
            student, teacher = student.to(acc) / temperature, teacher.to(acc) / temperature
        log_q, log_p = student.log_softmax(-1, dtype=acc), teacher.log_softmax(-1, dtype=acc)
        q, p = log_q.exp(), log_p.exp()
        x = log_q.sub_(log_p)
        # p (e^x - 1 - x) is q - p - p x: of so small a p it is q, and e^x may not be finite.
        value = torch.where(p < 1e-35, q, x.expm1().sub_(x).mul_(p))
        losses = value.sum(-1).mul_(weight * temperature * temperature)
        losses = losses.sub_(tolerance).clamp_(min=0)  # NaN stays
        if keep is not None:  # rows that are not counted may hold NaN
            losses = torch.where(keep, losses, 0.0)
        ctx.save_for_backward(q.sub_(p), losses)
        ctx.factor = gradient_factor(temperature, weight, KL)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        slope, losses = ctx.saved_tensors
        slope = slope * (upstream * ctx.factor)[:, None]
        gradient = torch.where((losses <= 0)[:, None], 0.0, slope)
        return gradient, None, None, None, None, None


def masked_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    *,
    divergence: str = "kl",
    temperature: float = 1.0,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """KL divergence from teacher to student logits over the counted rows, or another.

    Row loss = max(weight * T^2 * KL(softmax(teacher / T) || softmax(student / T)) - tolerance, 0):
    Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2 (soft targets,
    factor T^2); the tolerance is VE-KD's, per row. KL is summed as p * (d + expm1(-d)),
    d = log p - log q, which stays non-negative and exact where the student is close.

    Args:
        student_logits: [..., V], float32, float16 or bfloat16 (sums are float32; float64 stays).
        teacher_logits: [..., V], any of these dtypes; gets no gradient.
        mask: bool [...], True = counted, or int64 [n], ascending indices into the flattened rows;
            None counts every row. Rows that are not counted may hold NaN.
        divergence: "kl"; or in its place, as in Wen et al. 2023, "f-Divergence Minimization for
            Sequence-Level Knowledge Distillation", on tokens: "reverse_kl", KL(student ||
            teacher); "js", Jensen-Shannon's (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2; "tv",
            total variation, sum |p - q| / 2, whose derivative is taken as 0 where p = q.
        reduction: "none" gives [...] with 0 at rows not counted, or of indices [n], a loss for
            each; "sum"; "mean" divides by the number of counted rows and is 0 without any.

    Returns:
        Loss in float32. Its gradients come from loss.backward() or torch.autograd.grad.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, row indices out of range or not
            ascending (on a GPU, where a check would wait for the device, one out of range has an
            infinite loss), temperature <= 0, weight or tolerance below 0,
            an unknown divergence or reduction.
        RuntimeError: second or forward-mode derivatives, or such by torch.func.
    """
    op = "masked_kl"
    check_pair(op, "logits", student_logits, teacher_logits)
    check_options(op, weight, tolerance, reduction, temperature)
    check_choice(op, "divergence", divergence, DIVERGENCES[:MSE])
    refuse_transforms(op, student_logits)
    lead, width = student_logits.shape[:-1], student_logits.shape[-1]
    rows = flat_rows(op, mask, lead, student_logits.device)
    student = row_stride(student_logits.reshape(-1, width))
    teacher = row_stride(teacher_logits.detach().reshape(-1, width))
    options = (temperature, weight, tolerance)
    if divergence == "kl" and student.is_cuda and student.numel() <= FEW:
        note_path("torch")
        if (listed := indices(rows)) is not None:
            student, teacher = student[listed], teacher[listed]
        losses = _Plain.apply(student, teacher, rows if listed is None else None, *options)
    else:
        losses, _ = _op(student, teacher, rows, *options, DIVERGENCES.index(divergence))
    return reduce_rows(losses, rows, lead, reduction)
