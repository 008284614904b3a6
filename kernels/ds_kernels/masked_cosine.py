"""Cosine distance between hidden states over counted rows, several layers in one launch."""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._shared import (
    above_tolerance,
    accumulator,
    check_options,
    check_pair,
    differentiable,
    flat_rows,
    hinge,
    indices,
    jit,
    reduce_rows,
    refuse_transforms,
    row_parts,
    row_stride,
    tl,
    use_triton,
)
from ._tiles import (
    LISTED,
    counted_row,
    granules,
    load,
    programs,
    row_launch,
    span,
    store,
    store_zeros,
    tiles,
    uncounted,
)

_REFERENCE_ELEMENTS = 1 << 18


@jit
def _select(layers, layer, LAYERS: tl.constexpr):
    pointer = layers[0]
    for i in tl.static_range(1, LAYERS):
        pointer = tl.where(layer == i, layers[i], pointer)
    return pointer


@jit
def _forward_kernel(
    students, teachers, rows, losses, stats, places,
    stride_s, stride_t, num_rows, weight, tolerance,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    LAYERS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    number, row, keep = counted_row(rows, num_rows, ROWS)
    layer = tl.program_id(1)
    scale_s = tl.zeros([], ACC)
    scale_t = tl.zeros([], ACC)
    distance = tl.zeros([], ACC)
    loss = uncounted(ROWS, ACC)
    if ROWS == LISTED:
        tl.store(places + row, number.to(tl.int32), mask=keep & (layer == 0))
    if keep:
        base, shift, end, limit = span(row, stride_s, V, GRANULE, SHIFTED)
        student = _select(students, layer, LAYERS) + base
        teacher = _select(teachers, layer, LAYERS) + granules(row, stride_t, GRANULE)
        tile = tl.arange(0, BLOCK)
        sum_s = tl.zeros([BLOCK], ACC)
        sum_t = tl.zeros([BLOCK], ACC)
        for part in tl.static_range(3):
            begin, behind = tiles(part, end, BLOCK, SHIFTED)
            for step in range(begin, behind):
                at = step * BLOCK + tile
                s = load(student, at, shift, end, limit, part != 1, ACC, 0.0)
                t = load(teacher, at, shift, end, limit, part != 1, ACC, 0.0)
                sum_s += s * s
                sum_t += t * t
        square_s = tl.sum(sum_s, 0)
        square_t = tl.sum(sum_t, 0)
        scale_s = tl.where(square_s == 0, 0.0, 1 / tl.sqrt(square_s))
        scale_t = tl.where(square_t == 0, 0.0, 1 / tl.sqrt(square_t))
        sum_d = tl.zeros([BLOCK], ACC)
        for part in tl.static_range(3):
            begin, behind = tiles(part, end, BLOCK, SHIFTED)
            for step in range(begin, behind):
                at = step * BLOCK + tile
                s = load(student, at, shift, end, limit, part != 1, ACC, 0.0)
                t = load(teacher, at, shift, end, limit, part != 1, ACC, 0.0)
                difference = s * scale_s - t * scale_t
                sum_d += difference * difference
        distance = 0.5 * tl.sum(sum_d, 0)
        distance = tl.where((square_s == 0) | (square_t == 0), 1.0, distance)
        loss = distance * weight
        loss = tl.where(loss <= tolerance, 0.0, loss - tolerance)
    number += layer * tl.num_programs(0)
    stats += 3 * number
    tl.store(losses + number, loss)
    tl.store(stats, scale_s)
    tl.store(stats + 1, scale_t)
    tl.store(stats + 2, distance)


@jit
def _backward_kernel(
    upstream, students, teachers, losses, stats, places, gradients,
    stride_s, stride_t, num_losses, weight,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    LAYERS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    base, shift, end, limit = span(row, stride_s, V, GRANULE, SHIFTED)
    gradient = _select(gradients, layer, LAYERS) + granules(row, V, GRANULE)
    student = _select(students, layer, LAYERS) + base
    teacher = _select(teachers, layer, LAYERS) + granules(row, stride_t, GRANULE)
    tile = tl.arange(0, BLOCK)
    number = tl.load(places + row).to(tl.int64) if ROWS == LISTED else row
    counted = number >= 0
    number += layer * num_losses
    if tl.load(losses + number, mask=counted, other=0.0) <= 0:
        store_zeros(gradient, shift, end, BLOCK, GRANULE, SHIFTED, ACC)
    else:
        stats += 3 * number
        scale_s = tl.load(stats)
        scale_t = tl.load(stats + 1)
        distance = tl.load(stats + 2)
        factor = tl.load(upstream + number).to(ACC) * weight * scale_s
        factor = tl.where(scale_t == 0, 0.0, factor)  # no direction to follow
        for part in tl.static_range(3):
            begin, behind = tiles(part, end, BLOCK, SHIFTED)
            for step in range(begin, behind):
                at = step * BLOCK + tile
                s = load(student, at, shift, end, limit, part != 1, ACC, 0.0) * scale_s
                t = load(teacher, at, shift, end, limit, part != 1, ACC, 0.0) * scale_t
                slope = factor * ((s - t) - distance * s)
                store(gradient, at, slope, shift, end, part != 1, GRANULE)


def _reference_forward(
    students: Sequence[Tensor],
    teachers: Sequence[Tensor],
    rows: Tensor | None,
    weight: float,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    losses, stats, places = _outputs(students, teachers, rows)
    losses.zero_()
    num_rows, width = students[0].shape
    for part, of in row_parts(rows, num_rows, max(1, _REFERENCE_ELEMENTS // width)):
        for layer, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
            s, t = student[of].to(losses.dtype), teacher[of].to(losses.dtype)
            square_s, square_t = s.square().sum(-1), t.square().sum(-1)
            scale_s = torch.where(square_s == 0, 0.0, square_s.rsqrt())
            scale_t = torch.where(square_t == 0, 0.0, square_t.rsqrt())
            difference = (s * scale_s[:, None]).sub_(t * scale_t[:, None])
            distance = difference.square_().sum(-1).mul_(0.5)
            distance = torch.where((square_s == 0) | (square_t == 0), 1.0, distance)
            losses[layer, part] = hinge(distance * weight, tolerance)
            stats[layer, part] = torch.stack((scale_s, scale_t, distance), 1)
    return losses, stats, places


def _reference_backward(
    upstream: Tensor,
    students: Sequence[Tensor],
    teachers: Sequence[Tensor],
    losses: Tensor,
    stats: Tensor,
    rows: Tensor | None,
    weight: float,
) -> list[Tensor]:
    gradients = [torch.zeros(s.shape, dtype=s.dtype, device=s.device) for s in students]
    size = max(1, _REFERENCE_ELEMENTS // students[0].shape[1])
    listed = indices(rows)
    for layer, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        for part in above_tolerance(losses[layer]).nonzero().squeeze(1).split(size):
            of = part if listed is None else listed[part]
            scale_s, scale_t, distance = stats[layer, part].T[..., None]
            s = student[of].to(losses.dtype) * scale_s
            t = teacher[of].to(losses.dtype) * scale_t
            factor = upstream[layer, part, None] * weight * scale_s
            factor = torch.where(scale_t == 0, 0.0, factor)
            slope = (s - t).sub_(s * distance).mul_(factor)
            gradients[layer][of] = slope.to(student.dtype)
    return gradients


def _outputs(
    students: Sequence[Tensor], teachers: Sequence[Tensor], rows: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [L, N], or of a list one for each index [L, n], what the backward pass needs of each
    [L, n, 3], and of a list where each row stands in it [N], -1 elsewhere."""
    acc, first = accumulator(*students, *teachers), students[0]
    shape = (len(students), programs(rows, len(first))[0])
    places = first.new_empty(0, dtype=torch.int32)
    if indices(rows) is not None:
        places = first.new_full((len(first),), -1, dtype=torch.int32)
    return first.new_empty(shape, dtype=acc), first.new_empty((*shape, 3), dtype=acc), places


def _gradients(
    upstream: Tensor, losses: Tensor, stats: Tensor, places: Tensor, students: Sequence[Tensor],
    *_: Any,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in students]


def _forward(
    students: Sequence[Tensor],
    teachers: Sequence[Tensor],
    rows: Tensor | None,
    weight: float,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not use_triton(students[0]):
        return _reference_forward(students, teachers, rows, weight, tolerance)
    losses, stats, places = _outputs(students, teachers, rows)
    num_rows = len(students[0])
    number, kind = programs(rows, num_rows)
    options = row_launch(losses.dtype, *students, *teachers, threads=32)
    if number:
        _forward_kernel[(number, len(students))](
            tuple(students), tuple(teachers), losses if rows is None else rows,
            losses, stats, places, students[0].stride(0), teachers[0].stride(0),
            num_rows, weight, tolerance, LAYERS=len(students), ROWS=kind, **options,
        )  # fmt: skip
    return losses, stats, places


def _backward(
    upstream: Tensor,
    losses: Tensor,
    stats: Tensor,
    places: Tensor,
    students: Sequence[Tensor],
    teachers: Sequence[Tensor],
    rows: Tensor | None,
    weight: float,
    tolerance: float,
) -> list[Tensor]:
    if not use_triton(students[0]):
        return _reference_backward(upstream, students, teachers, losses, stats, rows, weight)
    num_rows = len(students[0])
    gradients = _gradients(upstream, losses, stats, places, students)
    options = row_launch(losses.dtype, *students, *teachers, *gradients, threads=32)
    kind = programs(indices(rows), num_rows)[1]
    if num_rows:
        _backward_kernel[(num_rows, len(students))](
            upstream.contiguous(), tuple(students), tuple(teachers), losses, stats, places,
            tuple(gradients), students[0].stride(0), teachers[0].stride(0), losses.shape[1], weight,
            LAYERS=len(students), ROWS=kind, **options,
        )  # fmt: skip
    return gradients


_op = differentiable(
    "masked_cosine",
    "Tensor[] students, Tensor[] teachers, Tensor? rows, float weight, float tolerance",
    _forward,
    _backward,
    outputs=_outputs,
    gradients=_gradients,
    number=3,
)


def _as_rows(layers: Sequence[Tensor]) -> list[Tensor]:
    """[N, D] views with one row stride for all layers; copies only where strides differ."""
    rows = [row_stride(layer.reshape(-1, layer.shape[-1])) for layer in layers]
    same = len({row.stride(0) for row in rows}) == 1
    return rows if same else [row.contiguous() for row in rows]


def masked_cosine(
    student_hidden: Tensor | Sequence[Tensor],
    teacher_hidden: Tensor | Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cosine distance of student to teacher hidden states over the counted rows.

    Row loss = max(weight * (1 - cos(student, teacher)) - tolerance, 0): Sanh et al. 2019,
    "DistilBERT", section 2 (L_cos); the tolerance is VE-KD's, per row. 1 - cos is computed as
    |s/|s| - t/|t||^2 / 2, which stays exact for nearly parallel vectors. A zero vector has
    cos = 0 and no gradient.

    Args:
        student_hidden: [..., D], float32, float16 or bfloat16 (sums are float32; float64
            stays), or a sequence of L such tensors of one shape: all layers in one launch.
        teacher_hidden: the same shape or shapes; gets no gradient.
        mask: as in `masked_kl`; it holds for every layer. On a GPU an index out of range has an
            infinite loss.
        reduction: "none" gives [...], or [L, ...] for a sequence, as `masked_kl` does;
            "sum"; "mean" divides by the number of counted rows, so layers are summed.

    Returns:
        Loss in float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, row indices out of range (CPU),
            no layer, weight or tolerance below 0, an unknown reduction.
        RuntimeError: derivatives that `masked_kl` refuses, too.
    """
    op = "masked_cosine"
    single = isinstance(student_hidden, Tensor)
    students = [student_hidden] if isinstance(student_hidden, Tensor) else list(student_hidden)
    teachers = [teacher_hidden] if isinstance(teacher_hidden, Tensor) else list(teacher_hidden)
    if not students or len(students) != len(teachers):
        raise ValueError(f"{op}: {len(students)} student layers and {len(teachers)} teacher layers")
    for student, teacher in zip(students, teachers, strict=True):
        check_pair(op, "hidden", student, teacher)
        if student.shape != students[0].shape or student.dtype != students[0].dtype:
            raise ValueError(f"{op}: layers differ in shape or dtype")
        if teacher.dtype != teachers[0].dtype:
            raise ValueError(f"{op}: teacher layers differ in dtype")
    check_options(op, weight, tolerance, reduction)
    refuse_transforms(op, *students)
    lead = students[0].shape[:-1]
    rows = flat_rows(op, mask, lead, students[0].device)
    detached = [teacher.detach() for teacher in teachers]
    losses, *_ = _op(_as_rows(students), _as_rows(detached), rows, weight, tolerance)
    losses = losses.squeeze(0) if single else losses  # not [0], whose gradient is a tensor of zeros
    return reduce_rows(losses, rows, lead, reduction)
