"""Divergences between teacher and student logits, row by row.

The Triton kernels run one program per row: a first loop over the columns finds both log-sum-exps
online, a second one sums the divergence; only five numbers per row are stored, and the backward
pass reads the logits again. So any upstream gradient, per row too, is exact. Exponents are of 2, of
which the hardware has one instruction. Shapes: N rows, V columns.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ._divergences import (
    KL,
    MSE,
    elements,
    log2_sum,
    online,
)
from ._rows_reference import reference_backward, reference_forward
from ._shared import (
    accumulator,
    jit,
    register_limit,
    tl,
    use_triton,
)
from ._tiles import (
    LISTED,
    counted_row,
    gradient_to_write,
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


@jit
def _pair(
    student, teacher, bias_s, bias_t, at, shift, end, limit,
    EDGE: tl.constexpr, BIAS_S: tl.constexpr, BIAS_T: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    s = load(student, at, shift, end, limit, EDGE, ACC)
    t = load(teacher, at, shift, end, limit, EDGE, ACC)
    if BIAS_S:
        s += load(bias_s - shift, at, shift, end, end, EDGE, ACC)
    if BIAS_T:
        t += load(bias_t - shift, at, shift, end, end, EDGE, ACC)
    return s, t


@jit
def _log_sums(
    student, teacher, bias_s, bias_t, shift, end, limit, c,
    BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr, BIAS_S: tl.constexpr,
    BIAS_T: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Largest exponent of 2 and log2 of the sum less that, of the student's row and the teacher's,
    both found online in one walk."""
    tile = tl.arange(0, BLOCK)
    LANES: tl.constexpr = BLOCK // GRANULE
    max_s = tl.full([LANES], -1e38, ACC)
    max_t = tl.full([LANES], -1e38, ACC)
    sum_s = tl.zeros([LANES], ACC)
    sum_t = tl.zeros([LANES], ACC)
    for part in tl.static_range(3):
        begin, behind = tiles(part, end, BLOCK, SHIFTED)
        for number in range(begin, behind):
            s, t = _pair(
                student, teacher, bias_s, bias_t, number * BLOCK + tile, shift, end, limit,
                part != 1, BIAS_S, BIAS_T, ACC,
            )  # fmt: skip
            max_s, sum_s = online(s, c, max_s, sum_s, LANES, GRANULE, PTX)
            max_t, sum_t = online(t, c, max_t, sum_t, LANES, GRANULE, PTX)
    top_s, rest_s = log2_sum(max_s, sum_s, c, PTX)
    top_t, rest_t = log2_sum(max_t, sum_t, c, PTX)
    return top_s, rest_s, top_t, rest_t


@jit
def _forward_kernel(
    student, teacher, bias_s, bias_t, counted, losses, stats, unit_gradient,
    stride_s, stride_t, stride_g, num_rows, c, factor, tolerance,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    DIVERGENCE: tl.constexpr, EXACT: tl.constexpr, BIAS_S: tl.constexpr, BIAS_T: tl.constexpr,
    ROWS: tl.constexpr, GRADIENT: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    number, row, keep = counted_row(counted, num_rows, ROWS)
    top_s = tl.zeros([], ACC)
    top_t = tl.zeros([], ACC)
    rest_s = tl.zeros([], ACC)
    rest_t = tl.zeros([], ACC)
    loss = uncounted(ROWS, ACC)
    slope = tl.zeros([], ACC)
    if keep:
        base, shift, end, limit = span(row, stride_s, V, GRANULE, SHIFTED)
        student += base
        teacher += granules(row, stride_t, GRANULE)
        unit_gradient += granules(row, stride_g, GRANULE)
        tile = tl.arange(0, BLOCK)
        if DIVERGENCE != 4:
            top_s, rest_s, top_t, rest_t = _log_sums(
                student, teacher, bias_s, bias_t, shift, end, limit, c,
                BLOCK, GRANULE, SHIFTED, BIAS_S, BIAS_T, ACC, PTX,
            )  # fmt: skip
        value = tl.zeros([BLOCK], ACC)
        slopes = tl.zeros([BLOCK], ACC)
        # Last tile first: it is the one still in the cache.
        for part in tl.static_range(2, -1, -1):
            begin, behind = tiles(part, end, BLOCK, SHIFTED)
            for step in range(begin, behind):
                at = (begin + behind - 1 - step) * BLOCK + tile
                s, t = _pair(
                    student, teacher, bias_s, bias_t, at, shift, end, limit,
                    part != 1, BIAS_S, BIAS_T, ACC,
                )  # fmt: skip
                element, q, derivative = elements(
                    s, t, top_s, top_t, rest_s, rest_t, c, DIVERGENCE, EXACT, PTX
                )
                if part != 1:
                    inside = (at >= shift) & (at < end)
                    element = tl.where(inside, element, 0.0)
                    q = tl.where(inside, q, 0.0)
                value += element
                if (DIVERGENCE != 0) & (DIVERGENCE != 4):
                    slopes += tl.where(q != 0, q * derivative, 0.0)
                if GRADIENT:
                    store(unit_gradient, at, derivative, shift, end, part != 1, GRANULE)
        loss = tl.sum(value, 0) * factor
        loss = tl.where(loss <= tolerance, 0.0, loss - tolerance)
        slope = tl.sum(slopes, 0)
    stats += 5 * number
    tl.store(losses + number, loss)
    tl.store(stats, top_s)
    tl.store(stats + 1, top_t)
    tl.store(stats + 2, rest_s)
    tl.store(stats + 3, rest_t)
    tl.store(stats + 4, slope)


@jit
def _backward_kernel(
    upstream, student, teacher, counted, losses, stats, gradient,
    stride_s, stride_t, num_rows, c, factor,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    DIVERGENCE: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    number, row, keep = counted_row(counted, num_rows, ROWS)
    if keep:
        keep = not tl.load(losses + number) <= 0
    base, shift, end, limit = span(row, stride_s, V, GRANULE, SHIFTED)
    gradient += granules(row, V, GRANULE)
    tile = tl.arange(0, BLOCK)
    if not keep:
        if ROWS != LISTED:  # where all is zero that is not written
            store_zeros(gradient, shift, end, BLOCK, GRANULE, SHIFTED, ACC)
    else:
        student += base
        teacher += granules(row, stride_t, GRANULE)
        stats += 5 * number
        top_s = tl.load(stats)
        top_t = tl.load(stats + 1)
        rest_s = tl.load(stats + 2)
        rest_t = tl.load(stats + 3)
        slope = tl.load(stats + 4)
        scale = tl.load(upstream + number).to(ACC) * factor
        for part in tl.static_range(3):
            begin, behind = tiles(part, end, BLOCK, SHIFTED)
            for step in range(begin, behind):
                at = step * BLOCK + tile
                s = load(student, at, shift, end, limit, part != 1, ACC)
                t = load(teacher, at, shift, end, limit, part != 1, ACC)
                _, q, derivative = elements(
                    s, t, top_s, top_t, rest_s, rest_t, c, DIVERGENCE, EXACT, PTX
                )
                if (DIVERGENCE != 0) & (DIVERGENCE != 4):
                    derivative = tl.where(q != 0, q * (derivative - slope), 0.0)
                store(gradient, at, derivative * scale, shift, end, part != 1, GRANULE)


def gradient_factor(temperature: float, weight: float, divergence: int) -> float:
    """Derivative of the row loss by a logit, over the divergence's by a tempered logit."""
    return weight if divergence == MSE else weight * temperature


def row_outputs(
    student: Tensor, teacher: Tensor, rows: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    """Row losses [N], or of a list one for each index [n], and what the backward pass needs of each
    [n, 5]: both log-sum-exps, each in two parts, and the mean slope."""
    number, acc = programs(rows, len(student))[0], accumulator(student, teacher)
    return student.new_empty(number, dtype=acc), student.new_empty((number, 5), dtype=acc)


def forward_rows(
    student: Tensor,
    teacher: Tensor,
    rows: Tensor | None,
    temperature: float,
    weight: float,
    tolerance: float,
    divergence: int,
    bias_s: Tensor | None = None,
    bias_t: Tensor | None = None,
    unit_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `row_outputs`.

    The biases [V] are added to the logits as they are read. `unit_gradient` [N, V] receives the
    divergence's derivative by the tempered student logits (KL and MSE only: the others' needs a
    row statistic that comes later).
    """
    if divergence == MSE:
        temperature = 1.0
    inverse_t, factor = 1.0 / temperature, weight * temperature * temperature
    if not use_triton(student):
        return reference_forward(
            student, teacher, rows, inverse_t, factor, tolerance, divergence,
            bias_s, bias_t, unit_gradient,
        )  # fmt: skip
    losses, stats = row_outputs(student, teacher, rows)
    num_rows = len(student)
    number, kind = programs(rows, num_rows)
    made = [] if unit_gradient is None else [unit_gradient]
    options = row_launch(losses.dtype, student, teacher, *made)
    # Two programs of 16 warps at a time, where nothing spills then: not in float64.
    plain = divergence == KL and bias_s is None and bias_t is None and options["GRANULE"] > 2
    if number:
        _forward_kernel[(number,)](
            student, teacher,
            losses if bias_s is None else bias_s, losses if bias_t is None else bias_t,
            losses if rows is None else rows, losses, stats,
            losses if unit_gradient is None else unit_gradient,
            student.stride(0), teacher.stride(0),
            0 if unit_gradient is None else unit_gradient.stride(0),
            num_rows, inverse_t * math.log2(math.e), factor, tolerance,
            DIVERGENCE=divergence, EXACT=student.element_size() > 2,
            BIAS_S=bias_s is not None, BIAS_T=bias_t is not None,
            ROWS=kind, GRADIENT=unit_gradient is not None,
            **options, **register_limit(64 if plain else 128),
        )  # fmt: skip
    return losses, stats


def backward_rows(
    upstream: Tensor,
    losses: Tensor,
    stats: Tensor,
    student: Tensor,
    teacher: Tensor,
    rows: Tensor | None,
    temperature: float,
    weight: float,
    tolerance: float,
    divergence: int,
) -> list[Tensor]:
    """The gradient [N, V] of the student logits. losses and stats: as `forward_rows` gave them for
    these rows."""
    inverse_t, factor = 1.0 / temperature, gradient_factor(temperature, weight, divergence)
    if not use_triton(student):
        return reference_backward(
            upstream, student, teacher, losses, stats, rows, inverse_t, factor, divergence
        )
    num_rows = len(student)
    gradient, listed = gradient_to_write(student, rows)
    number, kind = programs(listed, num_rows)
    if number:
        _backward_kernel[(number,)](
            upstream.contiguous(), student, teacher, losses if listed is None else listed,
            losses, stats, gradient,
            student.stride(0), teacher.stride(0), num_rows, inverse_t * math.log2(math.e), factor,
            DIVERGENCE=divergence, EXACT=student.element_size() > 2, ROWS=kind,
            **row_launch(losses.dtype, student, teacher, gradient),
        )  # fmt: skip
    return [gradient]
