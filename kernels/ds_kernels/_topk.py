"""KL divergence on the teacher's K largest log-probabilities and one bucket for the rest, by rows.

The forward kernel reads the student's row once: an online log-sum-exp over the columns outside
K (the tail is summed, never formed as 1 - sum), to which the K columns are added at the end.
Shapes: N rows, V columns.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math

import torch
from torch import Tensor

from ._divergences import (
    LOG2E,
    difference,
    exp2,
    log2_sum,
    online,
    reference_relative_entropy,
    relative_entropy,
)
from ._shared import (
    above_tolerance,
    accumulator,
    hinge,
    jit,
    on_its_device,
    row_mask,
    target_options,
    tl,
    use_triton,
    warp_lanes,
)
from ._tiles import granule, granules, load, row_tile, span, store, store_zeros, tiles, walk

_REFERENCE_ELEMENTS = 1 << 18


@jit
def _teacher(
    log_probs, ids, tail, row, K: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """log2 of the K entries and of the tail, renormalised; absent entries have the largest id."""
    k = tl.arange(0, KP)
    columns = tl.load(ids + row * K + k, mask=k < K, other=-1)
    columns = tl.minimum(tl.maximum(columns, -1), 2147483646).to(tl.int32)
    valid = columns >= 0
    entries = tl.load(log_probs + row * K + k, mask=valid, other=-float("inf")).to(ACC) * LOG2E
    rest = tl.load(tail + row).to(ACC) * LOG2E
    largest = tl.maximum(tl.max(entries, 0), rest)
    lse = largest + tl.log2(tl.sum(exp2(entries - largest, PTX), 0) + exp2(rest - largest, PTX))
    return tl.where(valid, columns, 2147483647), entries - lse, rest - lse


@jit
def _forward_kernel(
    student, log_probs, ids, tail, counted, losses, stats,
    stride, num_rows, c, factor, tolerance,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lse = tl.zeros([], ACC)
    lse_rest = tl.zeros([], ACC)
    loss = tl.zeros([], ACC)
    keep = True
    if MASKED:
        keep = tl.load(counted + row) != 0
    if keep:
        base, shift, end, limit = span(row, stride, V, GRANULE, SHIFTED)
        columns, entries, rest = _teacher(log_probs, ids, tail, row, K, KP, ACC, PTX)
        own = tl.load(
            student + row * stride + columns, mask=columns < V, other=-float("inf")
        ).to(ACC)  # fmt: skip
        student += base
        tile = tl.arange(0, BLOCK)
        LANES: tl.constexpr = BLOCK // GRANULE
        largest = tl.full([LANES], -1e38, ACC)
        total = tl.zeros([LANES], ACC)
        found = tl.zeros([], tl.int32)
        # The ids are in ascending order, padding (-1) first.
        given = tl.sum((columns < 2147483647).to(tl.int32), 0)
        ids += row * K
        entry = K - given
        before = tl.full([], -1, tl.int64)
        column = tl.load(ids + entry, mask=entry < K, other=2147483647).to(tl.int64)
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
                    column = tl.load(ids + entry, mask=entry < K, other=2147483647).to(tl.int64)
                largest, total = online(x, c, largest, total, LANES, GRANULE, PTX)
        most, lse_rest = log2_sum(largest, total, c, PTX)
        lse_rest += most * c
        top = tl.maximum(tl.max(own, 0) * c, lse_rest)
        lse = top + tl.log2(tl.sum(exp2(own * c - top, PTX), 0) + exp2(lse_rest - top, PTX))
        log_q = own * c - lse
        value = relative_entropy(exp2(entries, PTX), exp2(log_q, PTX), entries - log_q)
        loss = tl.sum(tl.where(columns < 2147483647, value, 0.0), 0)
        log_q_rest = lse_rest - lse
        loss += relative_entropy(exp2(rest, PTX), exp2(log_q_rest, PTX), rest - log_q_rest)
        loss *= factor
        # An id outside the row was not found, one that stands twice was found once.
        loss = tl.where(found == given, loss, float("inf"))
        loss = tl.where(loss <= tolerance, 0.0, loss - tolerance)
    tl.store(losses + row, loss)
    tl.store(stats + row, lse)
    tl.store(stats + num_rows + row, lse_rest)


@jit
def _tail_backward_kernel(
    upstream, student, log_probs, ids, tail, losses, stats, gradient,
    stride, num_rows, c, factor, width,
    V: tl.constexpr, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Not V: Triton 3.6 would write each tile of a row whose number of tiles it knows.
    base, shift, end, limit = span(row, stride, width, GRANULE, SHIFTED)
    gradient += granules(row, V, GRANULE)
    tile = tl.arange(0, BLOCK)
    if tl.load(losses + row) <= 0:
        store_zeros(gradient, shift, end, BLOCK, SHIFTED, ACC)
    else:
        student += base
        _, _, rest = _teacher(log_probs, ids, tail, row, K, KP, ACC, PTX)
        lse = tl.load(stats + row)
        lse_rest = tl.load(stats + num_rows + row)
        # q - p of a column in the tail is q times what all of them have in common.
        d = rest - (lse_rest - lse)
        common = tl.where(lse_rest == -float("inf"), 0.0, difference(exp2(d, PTX), 1.0, d))
        common *= tl.load(upstream + row).to(ACC) * factor
        for part in tl.static_range(3):
            begin, behind = tiles(part, end, BLOCK, SHIFTED)
            for number in range(begin, behind):
                at = number * BLOCK + tile
                x = load(student, at, shift, end, limit, part != 1, ACC)
                store(gradient, at, exp2(x * c - lse, PTX) * common, shift, end, part != 1)


@jit
def _entries_backward_kernel(
    upstream, student, log_probs, ids, tail, losses, stats, gradient,
    stride, num_rows, c, factor,
    V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    # A launch of its own: it overwrites columns that other threads of the tail kernel wrote.
    row = tl.program_id(0).to(tl.int64)
    if not tl.load(losses + row) <= 0:
        columns, entries, _ = _teacher(log_probs, ids, tail, row, K, KP, ACC, PTX)
        inside = columns < V
        own = tl.load(student + row * stride + columns, mask=inside, other=-float("inf")).to(ACC)
        log_q = own * c - tl.load(stats + row)
        slope = difference(exp2(entries, PTX), exp2(log_q, PTX), entries - log_q)
        slope = slope * (tl.load(upstream + row).to(ACC) * factor)
        target = gradient + row * V + columns
        tl.store(target, slope.to(gradient.dtype.element_ty), mask=inside)


def _reference_teacher(
    log_probs: Tensor, ids: Tensor, tail: Tensor, acc: torch.dtype
) -> tuple[Tensor, Tensor]:
    entries = log_probs.to(acc).masked_fill(ids < 0, -float("inf"))
    both = torch.cat((entries, tail.to(acc)[:, None]), 1)
    both = both - torch.logsumexp(both, 1, keepdim=True)
    return both[:, :-1], both[:, -1:]


def _check_distinct(columns: Tensor, rows: Tensor) -> None:
    """columns: ids [n, K] of these rows [n]."""
    ordered = columns.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row, entry = twice.nonzero()[0].tolist()
        raise ValueError(
            f"topk_kl: id {ordered[row, entry]} stands twice in row {rows[row]} of teacher_ids; "
            "distinct columns, or -1 for padding, wanted"
        )


def _reference_forward(
    student: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    tail: Tensor,
    rows: Tensor | None,
    inverse_t: float,
    factor: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    acc = accumulator(student, log_probs)
    num_rows, width = student.shape
    losses = torch.zeros(num_rows, dtype=acc, device=student.device)
    stats = torch.zeros(2, num_rows, dtype=acc, device=student.device)
    if rows is None:
        rows = torch.arange(num_rows, device=student.device)
    elif rows.dtype == torch.bool:
        rows = rows.nonzero().squeeze(1)
    for chunk in rows.split(max(1, _REFERENCE_ELEMENTS // width)):
        x = student[chunk].to(acc) * inverse_t
        columns = ids[chunk].long()
        _check_distinct(columns, chunk)
        entries, rest = _reference_teacher(log_probs[chunk], columns, tail[chunk], acc)
        own = x.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -float("inf"))
        # Absent entries point at one extra column.
        x = torch.cat((x, x[:, :1]), 1)
        x.scatter_(1, torch.where(columns < 0, width, columns), -float("inf"))
        lse_rest = torch.logsumexp(x[:, :-1], 1, keepdim=True)
        lse = torch.logsumexp(torch.cat((own, lse_rest), 1), 1, keepdim=True)
        log_p, log_q = torch.cat((entries, rest), 1), torch.cat((own, lse_rest), 1) - lse
        value = reference_relative_entropy(log_p.exp(), log_q.exp(), log_p - log_q)
        losses[chunk] = hinge(value.sum(1).mul_(factor), tolerance)
        stats[:, chunk] = torch.stack((lse[:, 0], lse_rest[:, 0]))
    return losses, stats


def _reference_backward(
    upstream: Tensor,
    student: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    tail: Tensor,
    losses: Tensor,
    stats: Tensor,
    inverse_t: float,
    factor: float,
) -> Tensor:
    width = student.shape[1]
    gradient = torch.zeros(student.shape, dtype=student.dtype, device=student.device)
    size = max(1, _REFERENCE_ELEMENTS // width)
    for chunk in above_tolerance(losses).nonzero().squeeze(1).split(size):
        x = student[chunk].to(losses.dtype) * inverse_t
        columns = ids[chunk].long()
        entries, rest = _reference_teacher(log_probs[chunk], columns, tail[chunk], losses.dtype)
        lse, lse_rest = stats[:, chunk, None]
        q = torch.exp(x - lse)
        slope = q - torch.exp(rest + (x - lse_rest))
        inside = q.gather(1, columns.clamp(min=0)) - entries.exp()
        slope = torch.cat((slope, slope[:, :1]), 1)
        slope.scatter_(1, torch.where(columns < 0, width, columns), inside)
        scale = upstream[chunk, None] * factor
        gradient[chunk] = slope[:, :-1].mul_(scale).to(student.dtype)
    return gradient


@on_its_device
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
    """Row losses [N], and what the backward pass needs, [2, N]: the log-sum-exps of all columns and
    of those outside K."""
    inverse_t, factor = 1.0 / temperature, weight * temperature * temperature
    if not use_triton(student):
        return _reference_forward(student, log_probs, ids, tail, rows, inverse_t, factor, tolerance)
    acc = accumulator(student, log_probs)
    num_rows, width = student.shape
    losses = torch.empty(num_rows, dtype=acc, device=student.device)
    stats = torch.empty(2, num_rows, dtype=acc, device=student.device)
    counted = row_mask(rows, num_rows)
    columns = granule(student)
    block, warps = row_tile(width, columns, warp_lanes(student.device))
    ids, order = ids.sort(1)
    log_probs = log_probs.gather(1, order)
    if num_rows:
        _forward_kernel[(num_rows,)](
            student, log_probs, ids, tail, losses if counted is None else counted, losses, stats,
            student.stride(0), num_rows, inverse_t * math.log2(math.e), factor, tolerance,
            V=width, **walk(student, columns, block), K=ids.shape[1], KP=_padded(ids.shape[1]),
            MASKED=counted is not None,
            num_warps=warps, **target_options(acc),
        )  # fmt: skip
    return losses, stats


@on_its_device
def backward_topk(
    upstream: Tensor,
    student: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    tail: Tensor,
    losses: Tensor,
    stats: Tensor,
    temperature: float,
    weight: float,
) -> Tensor:
    """The gradient [N, V] of the student logits. losses and stats: as `forward_topk` gave them."""
    inverse_t, factor = 1.0 / temperature, weight * temperature
    if not use_triton(student):
        return _reference_backward(
            upstream, student, log_probs, ids, tail, losses, stats, inverse_t, factor
        )
    num_rows, width = student.shape
    gradient = torch.empty((num_rows, width), dtype=student.dtype, device=student.device)
    columns = granule(student, gradient)
    block, warps = row_tile(width, columns, warp_lanes(student.device))
    if num_rows:
        shared = (
            upstream.contiguous(), student, log_probs, ids, tail, losses, stats, gradient,
            student.stride(0), num_rows, inverse_t * math.log2(math.e), factor,
        )  # fmt: skip
        sizes = {"V": width, "K": ids.shape[1], "KP": _padded(ids.shape[1])}
        sizes |= target_options(losses.dtype)
        _tail_backward_kernel[(num_rows,)](
            *shared, width, **sizes, **walk(student, columns, block), num_warps=warps
        )
        _entries_backward_kernel[(num_rows,)](*shared, **sizes, num_warps=1)
    return gradient


def _padded(num_entries: int) -> int:
    return max(2, 1 << (num_entries - 1).bit_length())
