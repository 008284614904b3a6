"""KL divergence and squared error on logits that are projected here, and never all at once.

Only counted rows are projected, a bounded number at a time, to float32 logits (bfloat16 logits
would cost most of the gradient's precision near the teacher). The divergence's derivative by
the logits needs nothing from upstream but one factor per row, so it is stored in the hidden
dtype where it fits a budget; beyond the budget the backward pass projects again.

Of a student with a larger vocabulary than the teacher's, the first `entries` columns are compared.
Weights are cut inside the op: a part that the caller cut would be saved for the backward pass, and
keep a head that ZeRO stage 3 gathered whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._divergences import DIVERGENCES
from ._projections import (
    buffer,
    cast_of,
    checked_model,
    chunks,
    hidden_gradient,
    keeps,
    logits,
    mm,
    parted,
    put_rows,
    refuse_released,
    take,
    unscaled,
    weight_gradient,
)
from ._rows import forward_rows, gradient_factor
from ._shared import (
    above_tolerance,
    accumulator,
    check_choice,
    check_options,
    check_pair,
    differentiable,
    flat_rows,
    reduce_rows,
    refuse_transforms,
    use_triton,
)


def _divergence_rows(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    entries: int,
    options: tuple[float, float, float, int],
    unit_gradient: Tensor | None,
) -> Tensor:
    student = logits(student_hidden, student_weight[:entries])
    teacher = logits(teacher_hidden, teacher_weight[:entries])
    student_bias = None if student_bias is None else student_bias[:entries]
    teacher_bias = None if teacher_bias is None else teacher_bias[:entries]
    losses, _ = forward_rows(
        student, teacher, None, *options, student_bias, teacher_bias, unit_gradient
    )
    return losses


def _forward(
    student_hidden: Tensor,
    of_weight: Tensor,
    student_bias: Tensor | None,
    student_weight: Tensor,
    rows: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    entries: int,
    temperature: float,
    weight: float,
    tolerance: float,
    divergence: int,
    wanted: Sequence[bool],
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Losses [n], and the derivatives by the logits where they are kept.

    of_weight: what gets the weight's gradient: itself, or its slot.
    wanted: which of the first three get one.
    """
    assert teacher_hidden is not None and teacher_weight is not None
    use_triton(student_hidden)
    device = student_hidden.device
    num_counted = (student_hidden if rows is None else rows).shape[0]
    acc = accumulator(student_hidden, teacher_hidden)
    losses = student_hidden.new_empty(num_counted, dtype=acc)
    unit = buffer(student_hidden, num_counted if keep else 0, entries)
    options = (temperature, weight, tolerance, divergence)
    with torch.autocast(device.type, enabled=False):
        for start, end in chunks(num_counted, entries, device):
            losses[start:end] = _divergence_rows(
                take(student_hidden, rows, start, end), student_weight, student_bias,
                take(teacher_hidden, rows, start, end), teacher_weight, teacher_bias,
                entries, options, unit[start:end, :entries] if keep else None,
            )  # fmt: skip
    return losses, unit


def _outputs(
    student_hidden: Tensor, of_weight: Tensor, bias: Tensor | None, weight: Tensor,
    rows: Tensor | None, teacher_hidden: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    entries, keep = rest[2], rest[-1]
    num_counted = (student_hidden if rows is None else rows).shape[0]
    losses = student_hidden.new_empty(
        num_counted, dtype=accumulator(student_hidden, teacher_hidden)
    )
    return losses, buffer(student_hidden, num_counted if keep else 0, entries)


def _backward(
    upstream: Tensor, losses: Tensor, unit: Tensor, student_hidden: Tensor, of_weight: Tensor,
    student_bias: Tensor | None, student_weight: Tensor, rows: Tensor | None,
    teacher_hidden: Tensor | None, teacher_weight: Tensor | None, teacher_bias: Tensor | None,
    entries: int, temperature: float, weight: float, tolerance: float, divergence: int,
    wanted: Sequence[bool], keep: bool,
) -> list[Tensor]:  # fmt: skip
    use_triton(student_hidden)
    device, dtype, acc = student_hidden.device, student_hidden.dtype, losses.dtype
    refuse_released("linear_kl", student=student_weight, teacher=teacher_weight)
    factor = gradient_factor(temperature, weight, divergence)
    scale = torch.where(above_tolerance(losses), upstream * factor, 0)
    ratio, largest = parted(scale, dtype)
    num_counted = scale.shape[0]
    grad_hidden, grad_weight, grad_bias = (student_hidden.new_empty(0) for _ in range(3))
    if wanted[0]:
        grad_hidden = torch.zeros_like(student_hidden)
    spans = [(0, num_counted)] if keep else list(chunks(num_counted, entries, device))
    sum_weight: Tensor | None = None
    sum_bias = torch.zeros(entries, dtype=acc, device=device) if wanted[2] else None
    with torch.autocast(device.type, enabled=False):
        for start, end in spans:
            hidden = take(student_hidden, rows, start, end)
            if teacher_hidden is None or teacher_weight is None:
                part = unit[:, :entries]
            else:
                part = buffer(student_hidden, end - start, entries)[:, :entries]
                _divergence_rows(
                    hidden, student_weight, student_bias,
                    take(teacher_hidden, rows, start, end), teacher_weight, teacher_bias, entries,
                    (temperature, weight, 0.0, divergence), part,
                )  # fmt: skip
            if wanted[0]:
                product = hidden_gradient(part, student_weight[:entries])
                product = product.mul_(scale[start:end, None]).to(dtype)
                put_rows(grad_hidden, rows, start, end, product)
            if wanted[1]:
                scaled = (hidden * ratio[start:end]).to(dtype)
                # On a GPU one product is summed and rounded in one go.
                once = len(spans) == 1 and device.type == "cuda"
                sum_weight = weight_gradient(part, scaled, sum_weight, dtype if once else acc)
            if sum_bias is not None:
                sum_bias.add_(mm(part.t(), ratio[start:end].to(dtype))[:, 0])
        if wanted[1]:
            grad_weight = unscaled(sum_weight, largest, student_weight)
        if sum_bias is not None and student_bias is not None:
            grad_bias = unscaled(sum_bias, largest, student_bias)
    return [grad_hidden, grad_weight, grad_bias]


def _gradients(
    upstream: Tensor, losses: Tensor, unit: Tensor, hidden: Tensor, of_weight: Tensor,
    bias: Tensor | None, weight: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    given = zip((hidden, weight, bias), rest[-2], strict=True)
    return [
        torch.empty_like(x) if want and x is not None else hidden.new_empty(0) for x, want in given
    ]


def _kept(*inputs: Any) -> tuple[Any, ...]:
    """The very tensors passed in, so that ZeRO stage 3 refills them before the backward pass; the
    teacher's only where they are needed again."""
    return (*inputs[:5], None, None, None, *inputs[8:]) if inputs[-1] else inputs


_op = differentiable(
    "linear_kl",
    "Tensor student_hidden, Tensor of_weight, Tensor? student_bias, Tensor student_weight, "
    "Tensor? rows, Tensor? teacher_hidden, Tensor? teacher_weight, Tensor? teacher_bias, "
    "int entries, float temperature, float weight, float tolerance, int divergence, "
    "bool[] wanted, bool keep",
    _forward,
    _backward,
    outputs=_outputs,
    gradients=_gradients,
    kept=_kept,
)


def _losses(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None],
    rows: Tensor | None,
    entries: int | None,
    slot: Tensor | None,
    divergence: str,
    *options: float,
) -> Any:
    """Losses [n] of checked rows, of models that are not checked yet."""
    op = "linear_kl"
    check_choice(op, "divergence", divergence, ("kl", "mse"))
    refuse_transforms(op, *student)
    cast = cast_of(student[0].device.type)
    own, taught = (
        checked_model(op, name, model, cast)
        for name, model in (("student", student), ("teacher", teacher))
    )
    sizes = len(own[1]), len(taught[1])
    if entries is None and sizes[0] != sizes[1]:
        raise ValueError(
            f"{op}: student_weight has {sizes[0]} columns of logits, teacher_weight {sizes[1]}; "
            "give `entries`, the size of the common prefix of the vocabularies"
        )
    compared = sizes[0] if entries is None else entries
    if not 0 < compared <= min(sizes):
        raise ValueError(f"{op}: entries {compared}; from 1 to {min(sizes)} wanted")
    if slot is not None and (slot.shape, slot.dtype) != (own[1].shape, own[1].dtype):
        raise ValueError(f"{op}: slot {list(slot.shape)}, {slot.dtype}, is not of student_weight")
    # torch.compile traces no bool() of a tensor.
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in student]
    keep = any(wanted) and keeps(len(own[0] if rows is None else rows), compared, own[0])
    into = own[1] if slot is None or not (slot.requires_grad and wanted[1]) else slot
    numbers = (compared, *options, DIVERGENCES.index(divergence), wanted, keep)
    losses, _ = _op(own[0], into, own[2], own[1], rows, *taught, *numbers)
    return losses


def linear_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    entries: int | None = None,
    slot: Tensor | None = None,
    divergence: str = "kl",
    temperature: float = 1.0,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`masked_kl` on hidden @ weight.T + bias without ever holding the [N, V] logits.

    Row loss = max(weight * T^2 * KL(softmax(z_t / T) || softmax(z_s / T)) - tolerance, 0) with
    z = hidden @ weight.T + bias: Hinton et al. 2015, section 2. Weights may be an embedding's:
    under ZeRO stage 3 pass `module.weight` inside the wrapped module's forward.

    Args:
        student_hidden: [..., Ds], float32, float16 or bfloat16.
        student_weight: [V, Ds], the dtype of student_hidden (under autocast both are cast).
        teacher_hidden: [..., Dt], the same leading shape; no gradient to any teacher tensor.
        teacher_weight: [V, Dt], the dtype of teacher_hidden.
        mask: as in `masked_kl`; bool costs one device synchronisation, int64 indices none.
        student_bias, teacher_bias: [V].
        entries: compare the first so many columns of both; the weights and biases may then have
            more, not the same number. None: all, and both have as many.
        slot: of `linear_cross_entropy` on the same student_weight, whose gradient is then that of
            both, with one [V, Ds] in memory.
        divergence: "kl"; or "mse", in its place sum_v (z_s - z_t)^2 without a temperature, as in
            VE-KD's code (weight 1 / V for a mean).
        reduction: as in `masked_kl`.

    Returns:
        Loss in float32; gradients reach student_hidden, student_weight and student_bias.

    Raises:
        ValueError: what `masked_kl` refuses, vocabularies of unlike size, more entries than one of
            them has.
        RuntimeError: derivatives that `masked_kl` refuses, too.
    """
    op, lead = "linear_kl", student_hidden.shape[:-1]
    check_options(op, weight, tolerance, reduction, temperature)
    check_pair(op, "hidden", student_hidden, teacher_hidden, same_last=False)
    rows = counted = flat_rows(op, mask, lead, student_hidden.device)
    if counted is not None and counted.dtype == torch.bool:
        rows = counted.nonzero().squeeze(1)
    losses = _losses(
        (student_hidden, student_weight, student_bias),
        (teacher_hidden, teacher_weight, teacher_bias),
        rows, entries, slot, divergence, temperature, weight, tolerance,
    )  # fmt: skip
    if rows is not counted and rows is not None and reduction == "none":
        losses, rows = losses.new_zeros(lead.numel()).index_copy(0, rows, losses), None
    return reduce_rows(losses, rows, lead, reduction)
