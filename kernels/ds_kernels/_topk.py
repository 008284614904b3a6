"""KL divergence on the teacher's K largest log-probabilities and one bucket for the rest, by rows.

The forward kernel reads the student's row once: an online log-sum-exp over the columns outside
K (the tail is summed, never formed as 1 - sum), to which the K columns are added at the end.
Shapes: N rows, V columns.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._divergences import (
    LN2,
    LOG2E,
    difference,
    exp2,
    lanes_sum,
    online,
    relative_entropy,
)
from ._shared import (
    accumulator,
    jit,
    target_options,
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
from ._topk_reference import reference_backward, reference_forward


@jit
def _teacher(
    log_probs, ids, tail, row, K: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The K columns, their log-probabilities less `most`, the tail's, of all less the largest, and
    log2 of their sum. Absent entries have the largest id."""
    k = tl.arange(0, KP)
    columns = tl.load(ids + row * K + k, mask=k < K, other=-1)
    columns = tl.minimum(tl.maximum(columns, -1), 2147483646).to(tl.int32)
    valid = columns >= 0
    entries = tl.load(log_probs + row * K + k, mask=valid, other=-float("inf")).to(ACC)
    rest = tl.load(tail + row).to(ACC)
    most = tl.max(entries, 0)
    largest = tl.maximum(most, rest)
    most = tl.where(most == -float("inf"), largest, most)
    lse = tl.log2(
        tl.sum(exp2((entries - largest) * LOG2E, PTX), 0) + exp2((rest - largest) * LOG2E, PTX)
    )
    return tl.where(valid, columns, 2147483647), entries - most, most - largest, rest - largest, lse


@jit
def _sort_kernel(
    ids, counted, ordered, num_rows, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr
):
    """The ids of counted rows in ascending order, padding (-1) first."""
    _, row, keep = counted_row(counted, num_rows, ROWS)
    if keep:
        k = tl.arange(0, KP)
        columns = tl.load(ids + row * K + k, mask=k < K, other=2147483647)
        columns = tl.minimum(tl.maximum(columns, -1), 2147483647).to(tl.int32)
        tl.store(ordered + row * K + k, tl.sort(columns), mask=k < K)


@jit
def _entries(entries, most, lse_t, own, c, larger, lse_s, PTX: tl.constexpr):
    """p, q and log2(p / q) of the K entries. Teacher: as from `_teacher`. Student: logits less the
    largest, what more its largest of K + 1 is, and log2 of its sum less that. Logarithms are near
    to each other, and so is what is added: nothing is rounded as coarsely as they are large."""
    p = exp2(tl.fma(entries, LOG2E, tl.fma(most, LOG2E, -lse_t)), PTX)
    q = exp2(tl.fma(own, c, -(larger + lse_s)), PTX)
    apart = tl.fma(most, LOG2E, larger) - (lse_t - lse_s)
    return p, q, tl.fma(entries, LOG2E, -tl.fma(own, c, -apart))


@jit
def _summand(p, q, d, PTX: tl.constexpr):
    """`relative_entropy`, without what p and q are rounded by where q is not the larger: for the
    price of an exponential, which columns of whole rows would not be worth."""
    x = d * -LN2
    value = p * ((exp2(-d, PTX) - 1) - x)
    return tl.where((tl.abs(x) < 0.5) | (x > 1) | (p == 0), relative_entropy(p, q, d, PTX), value)


@jit
def _tail_sum(
    student, columns, ordered, row, shift, end, limit, c,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    K: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Of the student's columns that are not among the K: the largest and the sum less that; whether
    each of the K is a column and stands there once."""
    tile = tl.arange(0, BLOCK)
    LANES: tl.constexpr = BLOCK // GRANULE
    largest = tl.full([LANES], -1e38, ACC)
    total = tl.zeros([LANES], ACC)
    found = tl.zeros([], tl.int32)
    given = tl.sum((columns < 2147483647).to(tl.int32), 0)
    ordered += row * K
    entry = K - given
    before = tl.full([], -1, tl.int32)
    column = tl.load(ordered + entry, mask=entry < K, other=2147483647)
    for part in tl.static_range(3):
        begin, behind = tiles(part, end, BLOCK, SHIFTED)
        for number in range(begin, behind):
            at = number * BLOCK + tile
            x = load(student, at, shift, end, limit, part != 1, ACC)
            # The K columns leave the tail, each in the tile that holds it.
            while column < tl.minimum((number + 1) * BLOCK - shift, V):
                x = tl.where(at - shift == column, -float("inf"), x)
                found += (column != before).to(tl.int32)
                before = column
                entry += 1
                column = tl.load(ordered + entry, mask=entry < K, other=2147483647)
            largest, total = online(x, c, largest, total, LANES, GRANULE, PTX)
    most, in_rest = lanes_sum(largest, total, c, PTX)
    return most, in_rest, found == given


@jit
def _forward_kernel(
    student, log_probs, ids, ordered, tail, counted, losses, stats,
    stride, num_rows, c, factor, tolerance,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    number, row, keep = counted_row(counted, num_rows, ROWS)
    top = tl.zeros([], ACC)
    lse = tl.zeros([], ACC)
    log_rest = tl.zeros([], ACC)
    loss = uncounted(ROWS, ACC)
    if keep:
        base, shift, end, limit = span(row, stride, V, GRANULE, SHIFTED)
        columns, entries, most_t, rest, lse_t = _teacher(log_probs, ids, tail, row, K, KP, ACC, PTX)
        own = tl.load(
            student + row * stride + columns, mask=columns < V, other=-float("inf")
        ).to(ACC)  # fmt: skip
        student += base
        most, in_rest, once = _tail_sum(
            student, columns, ordered, row, shift, end, limit, c,
            V, BLOCK, GRANULE, SHIFTED, K, ACC, PTX,
        )  # fmt: skip
        top = tl.maximum(tl.max(own, 0), most)
        own -= top
        rest_top = (most - top) * c
        # Less the largest of the K + 1, as the teacher's.
        larger = tl.maximum(tl.max(own, 0) * c, rest_top + tl.log2(in_rest))
        rest_sum = in_rest * exp2(rest_top - larger, PTX)
        in_all = tl.sum(exp2(tl.fma(own, c, -larger), PTX), 0) + rest_sum
        sums = tl.log2(in_all)
        lse = larger + sums
        p, q, d = _entries(entries, most_t, lse_t, own, c, larger, sums, PTX)
        loss = tl.sum(tl.where(columns < 2147483647, _summand(p, q, d, PTX), 0.0), 0)
        # Of a tail that is most of all, which it often is, not the difference of two logarithms.
        far = rest_top + tl.log2(in_rest) - lse
        log_rest = tl.where(rest_sum > 1e-6 * in_all, tl.log2(rest_sum / in_all), far)
        rest = tl.fma(rest, LOG2E, -lse_t)
        loss += _summand(exp2(rest, PTX), exp2(log_rest, PTX), rest - log_rest, PTX)
        loss *= factor
        # An id outside the row was not found, one that stands twice was found once.
        loss = tl.where(once, loss, float("inf"))
        loss = tl.where(loss <= tolerance, 0.0, loss - tolerance)
    stats += 3 * number
    tl.store(losses + number, loss)
    tl.store(stats, top)
    tl.store(stats + 1, lse)
    tl.store(stats + 2, log_rest)


@jit
def _tail_backward_kernel(
    upstream, student, log_probs, ids, tail, counted, losses, stats, gradient,
    stride, num_rows, c, factor, width,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    number, row, keep = counted_row(counted, num_rows, ROWS)
    if keep:
        keep = not tl.load(losses + number) <= 0
    # Not V: Triton 3.6 would write each tile of a row whose number of tiles it knows.
    base, shift, end, limit = span(row, stride, width, GRANULE, SHIFTED)
    gradient += granules(row, V, GRANULE)
    tile = tl.arange(0, BLOCK)
    if not keep:
        if ROWS != LISTED:  # where all is zero that is not written
            store_zeros(gradient, shift, end, BLOCK, GRANULE, SHIFTED, ACC)
    else:
        student += base
        _, _, _, rest, lse_t = _teacher(log_probs, ids, tail, row, K, KP, ACC, PTX)
        stats += 3 * number
        top = tl.load(stats)
        lse = tl.load(stats + 1)
        log_rest = tl.load(stats + 2)
        # q - p of a column in the tail is q times what all of them have in common.
        d = tl.fma(rest, LOG2E, -lse_t) - log_rest
        common = tl.where(log_rest == -float("inf"), 0.0, difference(exp2(d, PTX), 1.0, d))
        common *= tl.load(upstream + number).to(ACC) * factor
        # One multiplication and addition a column; what its constant is rounded by all have alike.
        least = tl.fma(top, c, lse)
        common *= exp2(-(tl.fma(top, c, -least) + lse), PTX)
        for part in tl.static_range(3):
            begin, behind = tiles(part, end, BLOCK, SHIFTED)
            for step in range(begin, behind):
                at = step * BLOCK + tile
                x = load(student, at, shift, end, limit, part != 1, ACC)
                q = exp2(tl.fma(x, c, -least), PTX)
                store(gradient, at, q * common, shift, end, part != 1, GRANULE)


@jit
def _entries_backward_kernel(
    upstream, student, log_probs, ids, tail, counted, losses, stats, gradient,
    stride, num_rows, c, factor,
    V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    # A launch of its own: it overwrites columns that other threads of the tail kernel wrote.
    number, row, keep = counted_row(counted, num_rows, ROWS)
    if keep:
        keep = not tl.load(losses + number) <= 0
    if keep:
        columns, entries, most, _, lse_t = _teacher(log_probs, ids, tail, row, K, KP, ACC, PTX)
        inside = columns < V
        own = tl.load(student + row * stride + columns, mask=inside, other=-float("inf")).to(ACC)
        own -= tl.load(stats + 3 * number)
        lse = tl.load(stats + 3 * number + 1)
        p, q, d = _entries(entries, most, lse_t, own, c, 0.0, lse, PTX)
        slope = difference(p, q, d)
        slope = slope * (tl.load(upstream + number).to(ACC) * factor)
        target = gradient + row * V + columns
        tl.store(target, slope.to(gradient.dtype.element_ty), mask=inside)


def topk_outputs(
    student: Tensor, log_probs: Tensor, ids: Tensor, tail: Tensor, rows: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    """Row losses [N], or of a list one for each index [n], and what the backward pass needs of each
    [n, 3]: about the largest logit, less it log2 of the sum of all columns, and log2 of the share
    of those outside K. The reference has zeros and both log-sum-exps there."""
    number, acc = programs(rows, len(student))[0], accumulator(student, log_probs)
    return student.new_empty(number, dtype=acc), student.new_empty((number, 3), dtype=acc)


def forward_topk(
    student: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    tail: Tensor,
    rows: Tensor | None,
    temperature: float,
    weight: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    inverse_t, factor = 1.0 / temperature, weight * temperature * temperature
    if not use_triton(student):
        return reference_forward(student, log_probs, ids, tail, rows, inverse_t, factor, tolerance)
    losses, stats = topk_outputs(student, log_probs, ids, tail, rows)
    num_rows = len(student)
    number, kind = programs(rows, num_rows)
    ordered = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    counted = losses if rows is None else rows
    sizes = {"K": ids.shape[1], "KP": _padded(ids.shape[1]), "ROWS": kind}
    if number:
        _sort_kernel[(number,)](ids, counted, ordered, num_rows, **sizes, num_warps=1)
        _forward_kernel[(number,)](
            student, log_probs, ids, ordered, tail, counted, losses, stats,
            student.stride(0), num_rows, inverse_t * math.log2(math.e), factor, tolerance,
            **sizes, **row_launch(losses.dtype, student),
        )  # fmt: skip
    return losses, stats


def backward_topk(
    upstream: Tensor,
    losses: Tensor,
    stats: Tensor,
    student: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    tail: Tensor,
    rows: Tensor | None,
    temperature: float,
    weight: float,
    tolerance: float,
) -> list[Tensor]:
    """The gradient [N, V] of the student logits. losses and stats: as `forward_topk` gave them for
    these rows."""
    inverse_t, factor = 1.0 / temperature, weight * temperature
    if not use_triton(student):
        return reference_backward(
            upstream, student, log_probs, ids, tail, losses, stats, rows, inverse_t, factor
        )
    num_rows, width = student.shape
    gradient, listed = gradient_to_write(student, rows)
    number, kind = programs(listed, num_rows)
    if number:
        shared = (
            upstream.contiguous(), student, log_probs, ids, tail,
            losses if listed is None else listed, losses, stats, gradient,
            student.stride(0), num_rows, inverse_t * math.log2(math.e), factor,
        )  # fmt: skip
        sizes = {"K": ids.shape[1], "KP": _padded(ids.shape[1]), "ROWS": kind}
        options = row_launch(losses.dtype, student, gradient)
        _tail_backward_kernel[(number,)](*shared, width, **sizes, **options)
        options = target_options(losses.dtype) | {"V": width, "num_warps": 1}
        _entries_backward_kernel[(number,)](*shared, **sizes, **options)
    return [gradient]


def _padded(num_entries: int) -> int:
    return max(2, 1 << (num_entries - 1).bit_length())
