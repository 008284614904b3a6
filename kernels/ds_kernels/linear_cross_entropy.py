"""Cross-entropy on logits that are projected here, some rows at a time, forward and backward.

Where another loss reads the same head, two whole gradients of its weight would stand beside each
other until autograd adds them. So this op hands out a slot: what `linear_kl` puts in there comes to
this op's backward pass, which adds its own gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._projections import (
    buffer,
    cast_of,
    checked_model,
    chunks,
    hidden_gradient,
    logits,
    mm,
    parted,
    refuse_released,
    unscaled,
    weight_gradient,
)
from ._shared import accumulator, check_range, refuse_transforms


def _below_largest(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [n, V] less the largest of their row."""
    found = logits(hidden, weight)
    if bias is not None:
        found.add_(bias)
    return found.sub_(found.amax(dim=1, keepdim=True))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The very weight passed in, so that ZeRO stage 3 refills it before the backward pass.
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.set_materialize_grads(False)  # no zeros of the size of the weight
        losses = hidden.new_empty(len(labels), dtype=accumulator(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            for start, end in chunks(len(labels), len(weight), hidden.device):
                found = _below_largest(hidden[start:end], weight, bias)
                of_labels = found.gather(1, labels[start:end, None])[:, 0]
                losses[start:end] = found.exp_().sum(dim=1).log_().sub_(of_labels)
        return losses, weight.new_zeros(()).expand_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, total: Tensor | None) -> Any:
        """total: the gradient of the weight by the ops that were given the slot."""
        if upstream is None:
            return None, total, None, None
        hidden, weight, bias, labels = ctx.saved_tensors
        refuse_released("linear_cross_entropy", student=weight)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        dtype, device, acc = hidden.dtype, hidden.device, upstream.dtype
        ratio, largest = parted(upstream, dtype)
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        sum_bias = upstream.new_zeros(len(weight)) if of_bias else None
        sum_weight = None
        if of_weight:
            if total is not None and total.dtype == acc:
                sum_weight = total.contiguous()  # an expanded one cannot be written over
            else:
                sum_weight = torch.zeros_like(weight, dtype=acc)
        with torch.autocast(device.type, enabled=False):
            for start, end in chunks(len(labels), len(weight), device):
                part = _below_largest(hidden[start:end], weight, bias).exp_()
                part.div_(part.sum(dim=1, keepdim=True))
                own = labels[start:end, None]
                part.scatter_(1, own, part.gather(1, own) - 1)
                if dtype != acc:
                    part = buffer(hidden, *part.shape)[:, : len(weight)].copy_(part)
                if grad_hidden is not None:
                    product = hidden_gradient(part, weight)
                    grad_hidden[start:end] = product.mul_(upstream[start:end, None])
                if sum_weight is not None:
                    scaled = (hidden[start:end] * ratio[start:end]).to(dtype)
                    weight_gradient(part, scaled, sum_weight, acc)
                if sum_bias is not None:
                    sum_bias.add_(mm(part.t(), ratio[start:end].to(dtype))[:, 0])
        if sum_weight is not None and dtype != acc:
            if largest is not None:
                sum_weight.mul_(largest)
            sum_weight = (
                sum_weight.to(dtype) if total is None else total.contiguous().add_(sum_weight)
            )
        grad_bias = None if sum_bias is None else unscaled(sum_bias, largest, bias)
        return grad_hidden, sum_weight, grad_bias, None


def linear_cross_entropy(
    student_hidden: Tensor,
    student_weight: Tensor,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-log softmax(hidden @ weight.T + bias)[label] of each row, without [n, V] logits.

    Args:
        student_hidden: [n, D], float32, float16 or bfloat16.
        student_weight: [V, D], the dtype of student_hidden (under autocast both are cast).
        labels: int64 [n], from 0 to V - 1.
        student_bias: [V].

    Returns:
        Row losses in float32 [n], and the weight's slot: [V, D] without memory of its own, for
        `linear_kl` on the same weight in the same step. Its gradient is written over.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, labels out of range (CPU).
        RuntimeError: derivatives that `masked_kl` refuses, too.
    """
    op = "linear_cross_entropy"
    refuse_transforms(op, student_hidden, student_weight, student_bias)
    if labels.dtype != torch.int64 or labels.shape != student_hidden.shape[:1]:
        raise ValueError(
            f"{op}: labels are {labels.dtype} {list(labels.shape)}; int64 "
            f"{list(student_hidden.shape[:1])} wanted"
        )
    if student_hidden.dim() != 2 or labels.device != student_hidden.device:
        raise ValueError(
            f"{op}: student_hidden is {list(student_hidden.shape)} on {student_hidden.device}, "
            f"labels are on {labels.device}; [n, D] on one device wanted"
        )
    model = student_hidden, student_weight, student_bias
    hidden, weight, bias = checked_model(op, "student", model, cast_of(student_hidden.device.type))
    check_range(op, "labels", labels, len(weight) - 1)
    losses, slot = _LinearCrossEntropy.apply(hidden, weight, bias, labels)
    return losses, slot
