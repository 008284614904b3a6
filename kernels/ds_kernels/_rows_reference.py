"""`_rows` in plain PyTorch, a bounded number of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ._divergences import KL, MSE, reference_elements, reference_softmax
from ._shared import above_tolerance, accumulator, hinge, indices, row_parts
from ._tiles import programs

_REFERENCE_ELEMENTS = 1 << 19  # logits of one model at a time; smaller: threads wait for each other


def _divergence(
    student: Tensor,
    teacher: Tensor,
    inverse_t: float,
    factor: float,
    tolerance: float,
    divergence: int,
    bias_s: Tensor | None,
    bias_t: Tensor | None,
    acc: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n], stats [n, 5] and derivatives [n, V] of these rows."""
    s, t = _tempered(student, bias_s, inverse_t, acc), _tempered(teacher, bias_t, inverse_t, acc)
    if divergence == MSE:
        gap = s - t
        losses = hinge(gap.square().sum(-1).mul_(factor), tolerance)
        return losses, losses.new_zeros(len(losses), 5), gap.mul_(2)
    (q, lse_s), (p, lse_t) = reference_softmax(s), reference_softmax(t)
    value, derivative = reference_elements(s, t, lse_s, lse_t, p, q, divergence)
    losses = hinge(value.sum(-1).mul_(factor), tolerance)
    if divergence == KL:
        slope = torch.zeros_like(losses)
    else:
        slope = torch.where(q != 0, q * derivative, 0.0).sum(-1)
    nothing = torch.zeros_like(losses)
    stats = torch.stack((lse_s[:, 0], lse_t[:, 0], nothing, nothing, slope), 1)
    return losses, stats, derivative


def _tempered(x: Tensor, bias: Tensor | None, inverse_t: float, acc: torch.dtype) -> Tensor:
    x = x.to(acc)
    x = x if bias is None else x + bias
    return x if inverse_t == 1.0 else x * inverse_t


def reference_forward(
    student: Tensor,
    teacher: Tensor,
    rows: Tensor | None,
    inverse_t: float,
    factor: float,
    tolerance: float,
    divergence: int,
    bias_s: Tensor | None,
    bias_t: Tensor | None,
    unit_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    acc = accumulator(student, teacher)
    num_rows, width = student.shape
    options = (inverse_t, factor, tolerance, divergence, bias_s, bias_t, acc)
    size = max(1, _REFERENCE_ELEMENTS // width)
    if rows is None and unit_gradient is None and num_rows <= size:
        return _divergence(student, teacher, *options)[:2]
    number = programs(rows, num_rows)[0]
    losses = torch.zeros(number, dtype=acc, device=student.device)
    stats = torch.zeros(number, 5, dtype=acc, device=student.device)
    for part, of in row_parts(rows, num_rows, size):
        losses[part], stats[part], derivative = _divergence(student[of], teacher[of], *options)
        if unit_gradient is not None:
            unit_gradient[part] = derivative.to(unit_gradient.dtype)
    return losses, stats


def reference_backward(
    upstream: Tensor,
    student: Tensor,
    teacher: Tensor,
    losses: Tensor,
    stats: Tensor,
    rows: Tensor | None,
    inverse_t: float,
    factor: float,
    divergence: int,
) -> list[Tensor]:
    num_rows, width = student.shape
    gate, size, listed = above_tolerance(losses), _REFERENCE_ELEMENTS // width or 1, indices(rows)
    whole = listed is None and num_rows <= size and bool(gate.all())
    if not whole:
        gradient = torch.zeros(student.shape, dtype=student.dtype, device=student.device)
    for part in [slice(None)] if whole else gate.nonzero().squeeze(1).split(size):
        of = part if listed is None else listed[part]
        s = _tempered(student[of], None, inverse_t, losses.dtype)
        t = _tempered(teacher[of], None, inverse_t, losses.dtype)
        lse_s, lse_t, _, _, slope = stats[part].T[..., None]
        p, q = (t - lse_t).exp_(), (s - lse_s).exp_()
        if divergence == KL:
            derivative = q.sub_(p)
        else:
            _, derivative = reference_elements(s, t, lse_s, lse_t, p, q, divergence)
            derivative = torch.where(q != 0, q * (derivative - slope), 0.0)
        derivative.mul_((upstream[part] * factor)[:, None])
        if whole:
            return [derivative.to(student.dtype)]
        gradient[of] = derivative.to(student.dtype)
    return [gradient]
