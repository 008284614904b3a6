"""KL divergence between softmaxes of scores, without storing a map: attention and relations.

The forward kernel walks the keys twice for a block of queries: online log-sum-exps, then the
divergence. The backward kernel recomputes the scores: by rows for the query gradient, by columns
for the key gradient, so that nothing is accumulated atomically. Shapes: B batch, A heads,
S positions, D head width.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._divergences import LOG2E, exp2, relative_entropy
from ._scores_reference import reference_backward, reference_forward
from ._shared import (
    INTERPRETED,
    above_tolerance,
    accumulator,
    capability,
    empty_like_heads,
    jit,
    note_path,
    register_limit,
    target_options,
    tl,
    use_triton,
)

BY_ROWS, BY_COLUMNS, SYMMETRIC = range(3)


@jit
def _rows(
    pointer, position, keep, stride, D: tl.constexpr, DP: tl.constexpr, UPCAST: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    # Positions outside the mask are read as 0: 0 * NaN would leak through the products.
    d = tl.arange(0, DP)
    # Within a head 32 bits do (see contiguous_rows); 64 would cost registers.
    offsets = position[:, None] * stride + d[None, :]
    x = tl.load(pointer + offsets, mask=keep[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:  # the interpreter multiplies bfloat16 bit patterns
        x = x.to(ACC)
    return x


@jit
def _of(pointer, strides, batch, head):
    return pointer + batch * strides[0] + head * strides[1]


@jit
def _at(pointer, position, length):
    """Numbers of these positions, 0 behind the last."""
    return tl.load(pointer + position, mask=position < length, other=0)


@jit
def _scores(x, y, scale, ACC: tl.constexpr):
    """Exponents of 2."""
    return tl.dot(x, tl.trans(y), input_precision="ieee", out_dtype=ACC) * (scale * LOG2E)


@jit
def _online_rows(x, largest, total, PTX: tl.constexpr):
    """As `online`, of rows of exponents of 2."""
    new = tl.maximum(largest, tl.max(x, 1))
    total = total * exp2(largest - new, PTX)
    return new, total + tl.sum(exp2(x - new[:, None], PTX), 1)


@jit
def _place(blocks, heads, BLOCK: tl.constexpr):
    """Which map of the B * A this program reads, its batch and head, and its block of positions."""
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BLOCK
    return pair, pair // heads, pair % heads, first, first + tl.arange(0, BLOCK)


@jit
def _log_sums(
    xs, xt, key_s, key_t, valid, end, length, stride_ks, stride_kt, scale_s, scale_t,
    DS: tl.constexpr, DSP: tl.constexpr, DT: tl.constexpr, DTP: tl.constexpr,
    BLOCK: tl.constexpr, UPCAST: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """log2 of the sums over the keys, the student's and the teacher's, of a block of queries."""
    max_s = tl.full([BLOCK], -1e38, ACC)  # finite: a row of -inf gives 0, not NaN
    max_t = tl.full([BLOCK], -1e38, ACC)
    sum_s = tl.zeros([BLOCK], ACC)
    sum_t = tl.zeros([BLOCK], ACC)
    for start in range(0, end, BLOCK):
        other = start + tl.arange(0, BLOCK)
        inside = _at(valid, other, length) != 0
        ys = _rows(key_s, other, inside, stride_ks[2], DS, DSP, UPCAST, ACC)
        s = _scores(xs, ys, scale_s, ACC)
        s = tl.where(inside[None, :], s, -float("inf"))
        max_s, sum_s = _online_rows(s, max_s, sum_s, PTX)
        yt = _rows(key_t, other, inside, stride_kt[2], DT, DTP, UPCAST, ACC)
        t = _scores(xt, yt, scale_t, ACC)
        t = tl.where(inside[None, :], t, -float("inf"))
        max_t, sum_t = _online_rows(t, max_t, sum_t, PTX)
    return max_s + tl.log2(sum_s), max_t + tl.log2(sum_t)


@jit
def _forward_kernel(
    query_s, key_s, query_t, key_t, valid, ends, losses, stats,
    stride_qs, stride_ks, stride_qt, stride_kt,
    heads, length, blocks, num_rows, scale_s, scale_t, factor, tolerance,
    DS: tl.constexpr, DSP: tl.constexpr, DT: tl.constexpr, DTP: tl.constexpr,
    BLOCK: tl.constexpr, UPCAST: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    pair, batch, head, first, own = _place(blocks, heads, BLOCK)
    end = tl.load(ends + batch)
    loss = tl.zeros([BLOCK], ACC)
    lse_s = tl.zeros([BLOCK], ACC)
    lse_t = tl.zeros([BLOCK], ACC)
    if first < end:
        valid += batch * length
        counted = _at(valid, own, length) != 0
        query_s = _of(query_s, stride_qs, batch, head)
        query_t = _of(query_t, stride_qt, batch, head)
        key_s = _of(key_s, stride_ks, batch, head)
        key_t = _of(key_t, stride_kt, batch, head)
        xs = _rows(query_s, own, counted, stride_qs[2], DS, DSP, UPCAST, ACC)
        xt = _rows(query_t, own, counted, stride_qt[2], DT, DTP, UPCAST, ACC)
        lse_s, lse_t = _log_sums(
            xs, xt, key_s, key_t, valid, end, length, stride_ks, stride_kt, scale_s, scale_t,
            DS, DSP, DT, DTP, BLOCK, UPCAST, ACC, PTX,
        )  # fmt: skip
        gap = (lse_t - lse_s)[:, None]
        value = tl.zeros([BLOCK], ACC)
        for start in range(0, end, BLOCK):
            other = start + tl.arange(0, BLOCK)
            inside = _at(valid, other, length) != 0
            ys = _rows(key_s, other, inside, stride_ks[2], DS, DSP, UPCAST, ACC)
            s = _scores(xs, ys, scale_s, ACC)
            yt = _rows(key_t, other, inside, stride_kt[2], DT, DTP, UPCAST, ACC)
            t = _scores(xt, yt, scale_t, ACC)
            log_q = s - lse_s[:, None]
            log_p = t - lse_t[:, None]
            # Close scores are subtracted first, exactly; of far ones the difference would be
            # rounded more than log p and log q are.
            apart = t - s
            d = tl.where(tl.abs(apart) < 1, apart - gap, log_p - log_q)
            element = relative_entropy(exp2(log_p, PTX), exp2(log_q, PTX), d, PTX)
            value += tl.sum(tl.where(inside[None, :], element, 0.0), 1)
        loss = value * factor
        loss = tl.where(loss <= tolerance, 0.0, loss - tolerance)
        loss = tl.where(counted, loss, 0.0)
    row = pair * length + own
    tl.store(losses + row, loss, mask=own < length)
    tl.store(stats + row, lse_s, mask=own < length)
    tl.store(stats + num_rows + row, lse_t, mask=own < length)


@jit
def _backward_kernel(
    ratio, largest, own_s, other_s, own_t, other_t, valid, ends, stats, gradient,
    stride_os, stride_ys, stride_ot, stride_yt, stride_g,
    heads, length, blocks, num_rows, scale_s, scale_t,
    DS: tl.constexpr, DSP: tl.constexpr, DT: tl.constexpr, DTP: tl.constexpr,
    BLOCK: tl.constexpr, MODE: tl.constexpr,
    UPCAST: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    pair, batch, head, first, own = _place(blocks, heads, BLOCK)
    end = tl.load(ends + batch)
    gradient = _of(gradient, stride_g, batch, head)
    total = tl.zeros([BLOCK, DSP], ACC)
    if first < end:
        valid += batch * length
        counted = _at(valid, own, length) != 0
        own_s = _of(own_s, stride_os, batch, head)
        other_s = _of(other_s, stride_ys, batch, head)
        own_t = _of(own_t, stride_ot, batch, head)
        other_t = _of(other_t, stride_yt, batch, head)
        ratio += pair * length
        stats += pair * length
        xs = _rows(own_s, own, counted, stride_os[2], DS, DSP, UPCAST, ACC)
        xt = _rows(own_t, own, counted, stride_ot[2], DT, DTP, UPCAST, ACC)
        own_ratio = _at(ratio, own, length).to(ACC)[:, None]
        own_lse_s = _at(stats, own, length)[:, None]
        own_lse_t = _at(stats + num_rows, own, length)[:, None]
        for start in range(0, end, BLOCK):
            other = start + tl.arange(0, BLOCK)
            inside = _at(valid, other, length) != 0
            ys = _rows(other_s, other, inside, stride_ys[2], DS, DSP, UPCAST, ACC)
            yt = _rows(other_t, other, inside, stride_yt[2], DT, DTP, UPCAST, ACC)
            s = _scores(xs, ys, scale_s, ACC)
            t = _scores(xt, yt, scale_t, ACC)
            slope = tl.zeros([BLOCK, BLOCK], ACC)
            if MODE != 1:  # this block holds the queries
                change = exp2(s - own_lse_s, PTX) - exp2(t - own_lse_t, PTX)
                taken = inside[None, :] & (own_ratio != 0) if MODE == 2 else inside[None, :]
                slope += tl.where(taken, change * own_ratio, 0.0)
            if MODE != 0:  # the other block does
                weight = _at(ratio, other, length).to(ACC)
                lse_s = _at(stats, other, length)[None, :]
                lse_t = _at(stats + num_rows, other, length)[None, :]
                change = exp2(s - lse_s, PTX) - exp2(t - lse_t, PTX)
                taken = (inside & (weight != 0))[None, :]
                slope += tl.where(taken, change * weight[None, :], 0.0)
            total += tl.dot(slope.to(ys.dtype), ys, input_precision="ieee", out_dtype=ACC)
        taken = counted[:, None] & (own_ratio != 0) if MODE == 0 else counted[:, None]
        total = tl.where(taken, total * (tl.load(largest) * scale_s), 0.0)
    d = tl.arange(0, DSP)
    target = gradient + own[:, None] * stride_g[2] + d[None, :]
    inside = (own < length)[:, None] & (d < DS)[None, :]
    tl.store(target, total.to(gradient.dtype.element_ty), mask=inside)


def forward_scores(
    query_s: Tensor,
    key_s: Tensor,
    query_t: Tensor,
    key_t: Tensor,
    valid: Tensor | None,
    scale_s: float,
    scale_t: float,
    weight: float,
    tolerance: float,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """Row losses [B, A, S] and both log-sum-exps [2, B, A, S]."""
    acc = accumulator(query_s, query_t)
    batch, heads, length, _ = query_s.shape
    device = query_s.device
    if valid is None:
        valid = torch.ones(batch, length, dtype=torch.bool, device=device)
    losses = torch.zeros(batch, heads, length, dtype=acc, device=device)
    stats = torch.zeros(2, batch, heads, length, dtype=acc, device=device)
    if _runs_triton(query_s, acc):
        if losses.numel():
            launch, grid, blocks = _launch(query_s, query_t)
            _forward_kernel[grid](
                query_s, key_s, query_t, key_t,
                valid.contiguous(), _ends(valid), losses, stats,
                query_s.stride()[:3], key_s.stride()[:3],
                query_t.stride()[:3], key_t.stride()[:3],
                heads, length, blocks, losses.numel(), scale_s, scale_t, weight, tolerance,
                **launch,
            )  # fmt: skip
        return losses, stats
    student, teacher = (query_s, key_s, scale_s), (query_t, key_t, scale_t)
    reference_forward(student, teacher, valid, weight, tolerance, losses, stats)
    return losses, stats


def backward_scores(
    upstream: Tensor,
    losses: Tensor,
    stats: Tensor,
    query_s: Tensor,
    key_s: Tensor,
    query_t: Tensor,
    key_t: Tensor,
    valid: Tensor | None,
    scale_s: float,
    scale_t: float,
    weight: float,
    tolerance: float,
    symmetric: bool,
) -> list[Tensor]:
    """Gradients of query_s and key_s; or their sum, where they are one tensor."""
    batch, heads, length, _ = query_s.shape
    device = query_s.device
    if valid is None:
        valid = torch.ones(batch, length, dtype=torch.bool, device=device)
    scale = torch.where(above_tolerance(losses), upstream * weight, 0)
    gradients = [empty_like_heads(x) for x in ([query_s] if symmetric else [query_s, key_s])]
    if not losses.numel():
        return gradients
    if not _runs_triton(query_s, stats.dtype):
        student, teacher = (query_s, key_s, scale_s), (query_t, key_t, scale_t)
        sums = reference_backward(student, teacher, valid, scale, stats, symmetric)
        return [made.copy_(of) for made, of in zip(gradients, sums, strict=False)]
    # Taken out, so that float16 slopes do not underflow where the loss is a mean.
    largest = scale.abs().amax()
    largest = torch.where(largest == 0, 1, largest)
    ratio, valid, ends = scale / largest, valid.contiguous(), _ends(valid)
    launch, grid, blocks = _launch(query_s, query_t)
    modes = [SYMMETRIC] if symmetric else [BY_ROWS, BY_COLUMNS]
    orders = (query_s, key_s, query_t, key_t), (key_s, query_s, key_t, query_t)
    for mode, tensors, gradient in zip(modes, orders, gradients, strict=False):
        _backward_kernel[grid](
            ratio, largest, *tensors, valid, ends, stats, gradient,
            *(tensor.stride()[:3] for tensor in tensors),
            gradient.stride()[:3], heads, length, blocks, losses.numel(), scale_s, scale_t,
            MODE=mode, **launch,
        )  # fmt: skip
    return gradients


def _runs_triton(query: Tensor, acc: torch.dtype) -> bool:
    """Triton 3.6 compiles no products of float64: gradient checks on a GPU take the reference."""
    if acc == torch.float64 and not INTERPRETED:
        note_path("reference")
        return False
    return use_triton(query)


def _ends(valid: Tensor) -> Tensor:
    """int32 [B]: behind the last real token of each example. Later tiles are not visited."""
    positions = torch.arange(1, valid.shape[1] + 1, dtype=torch.int32, device=valid.device)
    return (positions * valid).amax(1)


def _launch(student: Tensor, teacher: Tensor) -> tuple[dict[str, Any], tuple[int], int]:
    """Launch options, grid, and blocks of queries per head."""
    batch, heads, length, width = student.shape
    padded_s, padded_t = (max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (student, teacher))
    block, warps, stages = score_tile(
        max(student.element_size(), teacher.element_size()), max(padded_s, padded_t),
        capability(student.device),
    )  # fmt: skip
    blocks = -(-length // block)
    launch: dict[str, Any] = {
        "DS": width, "DSP": padded_s, "DT": teacher.shape[-1], "DTP": padded_t, "BLOCK": block,
        "UPCAST": INTERPRETED,
        "num_warps": warps, "num_stages": stages,
        **target_options(accumulator(student, teacher)), **register_limit(255),
    }  # fmt: skip
    return launch, (batch * heads * blocks,), blocks


def score_tile(element_size: int, width: int, capability: int) -> tuple[int, int, int]:
    """(queries and keys of a tile, warps, pipeline stages): as large as registers allow without
    spilling. Tiles of 64 rows on four warps are what the matrix units of sm_90 and sm_100 take;
    narrower ones compute products twice."""
    if element_size != 2:
        return 16, (4 if width <= 64 else 8), 2
    if width > 128:
        return 16, 8, 2
    if width > 64 and capability == 0:
        return 32, 8, 1
    if width > 64:
        return (64 if capability >= 90 else 32), 8, 2
    return (32, 2, 2) if capability < 90 else (64, 4, 2)
