"""KL divergence between softmaxes of scores, without storing a map: attention and relations.

The forward kernel walks the keys twice for a block of queries: online log-sum-exps, then the
divergence. The backward kernel recomputes the scores: by rows for the query gradient, by columns
for the key gradient, so that nothing is accumulated atomically. Shapes: B batch, A heads,
S positions, D head width.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._divergences import (
    difference,
    log_ratio,
    reference_log_ratio,
    reference_relative_entropy,
    reference_softmax,
    relative_entropy,
)
from ._shared import (
    INTERPRETED,
    above_tolerance,
    accumulator,
    hinge,
    jit,
    register_limit,
    tl,
    use_triton,
)

BY_ROWS, BY_COLUMNS, SYMMETRIC = range(3)
_REFERENCE_ELEMENTS = 1 << 18


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
def _scores(
    x, y, bias, own, other, length, scale, stride_own, stride_other,
    BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    score = tl.dot(x, tl.trans(y), input_precision="ieee", out_dtype=ACC) * scale
    if BIAS:
        offsets = own[:, None] * stride_own + other[None, :] * stride_other
        inside = (own < length)[:, None] & (other < length)[None, :]
        score += tl.load(bias + offsets, mask=inside, other=0.0).to(ACC)
    return score


@jit
def _online_rows(x, largest, total):
    new = tl.maximum(largest, tl.max(x, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    return new, total * tl.exp(largest - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)


@jit
def _forward_kernel(
    query_s, key_s, query_t, key_t, bias_s, bias_t, valid, losses, stats,
    stride_qs, stride_ks, stride_qt, stride_kt, stride_bs, stride_bt,
    heads, length, num_rows, scale_s, scale_t, factor, tolerance,
    DS: tl.constexpr, DSP: tl.constexpr, DT: tl.constexpr, DTP: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, BIAS_S: tl.constexpr, BIAS_T: tl.constexpr,
    UPCAST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) // TILES).to(tl.int64)
    batch = pair // heads
    head = pair % heads
    own = (tl.program_id(0) % TILES) * BLOCK + tl.arange(0, BLOCK)
    valid += batch * length
    counted = tl.load(valid + own, mask=own < length, other=0) != 0
    loss = tl.zeros([BLOCK], ACC)
    lse_s = tl.zeros([BLOCK], ACC)
    lse_t = tl.zeros([BLOCK], ACC)
    if tl.max(counted.to(tl.int32), 0) > 0:
        query_s += batch * stride_qs[0] + head * stride_qs[1]
        query_t += batch * stride_qt[0] + head * stride_qt[1]
        key_s += batch * stride_ks[0] + head * stride_ks[1]
        key_t += batch * stride_kt[0] + head * stride_kt[1]
        bias_s += batch * stride_bs[0] + head * stride_bs[1]
        bias_t += batch * stride_bt[0] + head * stride_bt[1]
        xs = _rows(query_s, own, counted, stride_qs[2], DS, DSP, UPCAST, ACC)
        xt = _rows(query_t, own, counted, stride_qt[2], DT, DTP, UPCAST, ACC)
        max_s = tl.full([BLOCK], -float("inf"), ACC)
        max_t = tl.full([BLOCK], -float("inf"), ACC)
        sum_s = tl.zeros([BLOCK], ACC)
        sum_t = tl.zeros([BLOCK], ACC)
        for start in range(0, TILES * BLOCK, BLOCK):
            other = start + tl.arange(0, BLOCK)
            inside = tl.load(valid + other, mask=other < length, other=0) != 0
            ys = _rows(key_s, other, inside, stride_ks[2], DS, DSP, UPCAST, ACC)
            s = _scores(
                xs, ys, bias_s, own, other, length, scale_s, stride_bs[2], stride_bs[3], BIAS_S, ACC
            )
            max_s, sum_s = _online_rows(tl.where(inside[None, :], s, -float("inf")), max_s, sum_s)
            yt = _rows(key_t, other, inside, stride_kt[2], DT, DTP, UPCAST, ACC)
            t = _scores(
                xt, yt, bias_t, own, other, length, scale_t, stride_bt[2], stride_bt[3], BIAS_T, ACC
            )
            max_t, sum_t = _online_rows(tl.where(inside[None, :], t, -float("inf")), max_t, sum_t)
        lse_s = max_s + tl.log(sum_s)
        lse_t = max_t + tl.log(sum_t)
        value = tl.zeros([BLOCK], ACC)
        for start in range(0, TILES * BLOCK, BLOCK):
            other = start + tl.arange(0, BLOCK)
            inside = tl.load(valid + other, mask=other < length, other=0) != 0
            ys = _rows(key_s, other, inside, stride_ks[2], DS, DSP, UPCAST, ACC)
            s = _scores(
                xs, ys, bias_s, own, other, length, scale_s, stride_bs[2], stride_bs[3], BIAS_S, ACC
            )
            yt = _rows(key_t, other, inside, stride_kt[2], DT, DTP, UPCAST, ACC)
            t = _scores(
                xt, yt, bias_t, own, other, length, scale_t, stride_bt[2], stride_bt[3], BIAS_T, ACC
            )
            d = log_ratio(s, t, lse_s[:, None], lse_t[:, None])
            element = relative_entropy(tl.exp(t - lse_t[:, None]), tl.exp(s - lse_s[:, None]), d)
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
    ratio, largest, own_s, other_s, own_t, other_t, bias_s, bias_t, valid, stats, gradient,
    stride_os, stride_ys, stride_ot, stride_yt, stride_bs, stride_bt, stride_g,
    heads, length, num_rows, scale_s, scale_t,
    DS: tl.constexpr, DSP: tl.constexpr, DT: tl.constexpr, DTP: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
    BIAS_S: tl.constexpr, BIAS_T: tl.constexpr, UPCAST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) // TILES).to(tl.int64)
    batch = pair // heads
    head = pair % heads
    own = (tl.program_id(0) % TILES) * BLOCK + tl.arange(0, BLOCK)
    valid += batch * length
    gradient += batch * stride_g[0] + head * stride_g[1]
    counted = tl.load(valid + own, mask=own < length, other=0) != 0
    total = tl.zeros([BLOCK, DSP], ACC)
    if tl.max(counted.to(tl.int32), 0) > 0:
        own_s += batch * stride_os[0] + head * stride_os[1]
        other_s += batch * stride_ys[0] + head * stride_ys[1]
        own_t += batch * stride_ot[0] + head * stride_ot[1]
        other_t += batch * stride_yt[0] + head * stride_yt[1]
        bias_s += batch * stride_bs[0] + head * stride_bs[1]
        bias_t += batch * stride_bt[0] + head * stride_bt[1]
        ratio += pair * length
        stats += pair * length
        xs = _rows(own_s, own, counted, stride_os[2], DS, DSP, UPCAST, ACC)
        xt = _rows(own_t, own, counted, stride_ot[2], DT, DTP, UPCAST, ACC)
        own_ratio = tl.load(ratio + own, mask=own < length, other=0.0).to(ACC)[:, None]
        own_lse_s = tl.load(stats + own, mask=own < length, other=0.0)[:, None]
        own_lse_t = tl.load(stats + num_rows + own, mask=own < length, other=0.0)[:, None]
        for start in range(0, TILES * BLOCK, BLOCK):
            other = start + tl.arange(0, BLOCK)
            inside = tl.load(valid + other, mask=other < length, other=0) != 0
            ys = _rows(other_s, other, inside, stride_ys[2], DS, DSP, UPCAST, ACC)
            yt = _rows(other_t, other, inside, stride_yt[2], DT, DTP, UPCAST, ACC)
            s = _scores(
                xs, ys, bias_s, own, other, length, scale_s, stride_bs[2], stride_bs[3], BIAS_S, ACC
            )
            t = _scores(
                xt, yt, bias_t, own, other, length, scale_t, stride_bt[2], stride_bt[3], BIAS_T, ACC
            )
            both = counted[:, None] & inside[None, :]
            slope = tl.zeros([BLOCK, BLOCK], ACC)
            if MODE != 1:  # this block holds the queries
                d = log_ratio(s, t, own_lse_s, own_lse_t)
                change = difference(tl.exp(t - own_lse_t), tl.exp(s - own_lse_s), d)
                slope += tl.where(both & (own_ratio != 0), change * own_ratio, 0.0)
            if MODE != 0:  # the other block does
                weight = tl.load(ratio + other, mask=other < length, other=0.0).to(ACC)[None, :]
                lse_s = tl.load(stats + other, mask=other < length, other=0.0)[None, :]
                lse_t = tl.load(stats + num_rows + other, mask=other < length, other=0.0)[None, :]
                d = log_ratio(s, t, lse_s, lse_t)
                change = difference(tl.exp(t - lse_t), tl.exp(s - lse_s), d)
                slope += tl.where(both & (weight != 0), change * weight, 0.0)
            total += tl.dot(slope.to(ys.dtype), ys, input_precision="ieee", out_dtype=ACC)
    total = total * (tl.load(largest) * scale_s)
    d = tl.arange(0, DSP)
    target = gradient + own[:, None] * stride_g[2] + d[None, :]
    inside = (own < length)[:, None] & (d < DS)[None, :]
    tl.store(target, total.to(gradient.dtype.element_ty), mask=inside)


def _spans(valid: Tensor, heads: int) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """(example, heads, query positions, key positions): a bounded number of scores at a time."""
    for example in range(valid.shape[0]):
        keys = valid[example].nonzero().squeeze(1)
        if not len(keys):
            continue
        group = max(1, _REFERENCE_ELEMENTS // len(keys) ** 2)
        rows = (
            len(keys) if len(keys) ** 2 <= _REFERENCE_ELEMENTS else _REFERENCE_ELEMENTS // len(keys)
        )
        for head in range(0, heads, group):
            for queries in keys.split(max(1, rows)):
                yield example, slice(head, head + group), queries, keys


def _reference_scores(
    query: Tensor, key: Tensor, bias: Tensor | None, scale: float, span: Any, acc: torch.dtype
) -> Tensor:
    example, heads, queries, keys = span
    q, k = query[example, heads][:, queries].to(acc), key[example, heads][:, keys].to(acc)
    scores = torch.baddbmm(q.new_zeros(()), q, k.mT, beta=0, alpha=scale)
    if bias is not None:
        scores += bias[example, heads][:, queries][:, :, keys]
    return scores


def forward_scores(
    query_s: Tensor,
    key_s: Tensor,
    query_t: Tensor,
    key_t: Tensor,
    bias_s: Tensor | None,
    bias_t: Tensor | None,
    valid: Tensor | None,
    scale_s: float,
    scale_t: float,
    weight: float,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Row losses [B, A, S] and both log-sum-exps [2, B, A, S]."""
    acc = accumulator(query_s, query_t)
    batch, heads, length, _ = query_s.shape
    device = query_s.device
    if valid is None:
        valid = torch.ones(batch, length, dtype=torch.bool, device=device)
    losses = torch.zeros(batch, heads, length, dtype=acc, device=device)
    stats = torch.zeros(2, batch, heads, length, dtype=acc, device=device)
    if use_triton(query_s):
        if losses.numel():
            launch, grid = _launch(query_s, query_t, bias_s, bias_t)
            _forward_kernel[grid](
                query_s, key_s, query_t, key_t,
                losses if bias_s is None else bias_s, losses if bias_t is None else bias_t,
                valid.contiguous(), losses, stats,
                query_s.stride()[:3], key_s.stride()[:3],
                query_t.stride()[:3], key_t.stride()[:3],
                _bias_stride(bias_s), _bias_stride(bias_t),
                heads, length, losses.numel(), scale_s, scale_t, weight, tolerance, **launch,
            )  # fmt: skip
        return losses, stats
    with torch.autocast(device.type, enabled=False):
        for span in _spans(valid, heads):
            s = _reference_scores(query_s, key_s, bias_s, scale_s, span, acc)
            t = _reference_scores(query_t, key_t, bias_t, scale_t, span, acc)
            (q, s_lse), (p, t_lse) = reference_softmax(s), reference_softmax(t)
            value = reference_relative_entropy(p, q, reference_log_ratio(s, t, s_lse, t_lse))
            example, head, queries, _ = span
            losses[example, head, queries] = hinge(value.sum(-1).mul_(weight), tolerance)
            stats[:, example, head, queries] = torch.stack((s_lse[..., 0], t_lse[..., 0]))
    return losses, stats


def backward_scores(
    upstream: Tensor,
    query_s: Tensor,
    key_s: Tensor,
    query_t: Tensor,
    key_t: Tensor,
    bias_s: Tensor | None,
    bias_t: Tensor | None,
    valid: Tensor | None,
    losses: Tensor,
    stats: Tensor,
    scale_s: float,
    scale_t: float,
    weight: float,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of query_s and key_s; or their sum, twice, where they are one tensor."""
    batch, heads, length, _ = query_s.shape
    device = query_s.device
    if valid is None:
        valid = torch.ones(batch, length, dtype=torch.bool, device=device)
    scale = torch.where(above_tolerance(losses), upstream * weight, 0)
    query_gradient = empty_like_heads(query_s)
    key_gradient = query_gradient if symmetric else empty_like_heads(key_s)
    if not losses.numel():
        return query_gradient, key_gradient
    if not use_triton(query_s):
        student, teacher = (query_s, key_s, bias_s, scale_s), (query_t, key_t, bias_t, scale_t)
        sums = _reference_backward(student, teacher, valid, scale, stats, symmetric)
        return query_gradient.copy_(sums[0]), key_gradient.copy_(sums[1])
    # Taken out, so that float16 slopes do not underflow where the loss is a mean.
    largest = scale.abs().amax()
    largest = torch.where(largest == 0, 1, largest)
    ratio, valid = scale / largest, valid.contiguous()
    launch, grid = _launch(query_s, query_t, bias_s, bias_t)
    biases = (losses if bias_s is None else bias_s, losses if bias_t is None else bias_t)
    stride_bs, stride_bt = _bias_stride(bias_s), _bias_stride(bias_t)
    across_bs = (*stride_bs[:2], stride_bs[3], stride_bs[2])
    across_bt = (*stride_bt[:2], stride_bt[3], stride_bt[2])
    rows = (query_s, key_s, query_t, key_t)
    columns = (key_s, query_s, key_t, query_t)
    passes = [(SYMMETRIC if symmetric else BY_ROWS, rows, stride_bs, stride_bt, query_gradient)]
    if not symmetric:
        passes.append((BY_COLUMNS, columns, across_bs, across_bt, key_gradient))
    for mode, tensors, stride_s, stride_t, gradient in passes:
        _backward_kernel[grid](
            ratio, largest, *tensors, *biases, valid, stats, gradient,
            *(tensor.stride()[:3] for tensor in tensors), stride_s, stride_t,
            gradient.stride()[:3], heads, length, losses.numel(), scale_s, scale_t,
            MODE=mode, **launch,
        )  # fmt: skip
    return query_gradient, key_gradient


def _reference_backward(
    student: tuple[Tensor, Tensor, Tensor | None, float],
    teacher: tuple[Tensor, Tensor, Tensor | None, float],
    valid: Tensor,
    scale: Tensor,
    stats: Tensor,
    symmetric: bool,
) -> list[Tensor]:
    """The same in plain PyTorch, in the dtype of `stats`. student, teacher: query, key, bias and
    the factor of their scores; scale: of each row's loss, [B, A, S]."""
    query, key, _, scale_s = student
    # Spans of one head add up: in float32, rounded once.
    sums = [torch.zeros_like(empty_like_heads(query), dtype=stats.dtype)] * 2
    if not symmetric:
        sums[1] = torch.zeros_like(sums[0])
    with torch.autocast(query.device.type, enabled=False):
        for span in _spans(valid, query.shape[1]):
            example, head, queries, keys = span
            s = _reference_scores(*student, span, stats.dtype)
            t = _reference_scores(*teacher, span, stats.dtype)
            s_lse, t_lse = stats[:, example, head, queries][..., None]
            change = s.sub_(s_lse).exp_().sub_(t.sub_(t_lse).exp_())
            change = change * (scale[example, head, queries][..., None] * scale_s)
            q, k = query[example, head][:, queries], key[example, head][:, keys]
            sums[0][example, head, queries] += change @ k.to(change)
            sums[1][example, head, keys] += change.mT @ q.to(change)
    return sums


def empty_like_heads(x: Tensor) -> Tensor:
    """[B, A, S, D] laid out as [B, S, A, D], as projections of hidden states are."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _bias_stride(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if bias is None else bias.stride()


def _launch(
    student: Tensor, teacher: Tensor, bias_s: Tensor | None, bias_t: Tensor | None
) -> tuple[dict[str, Any], tuple[int]]:
    batch, heads, length, width = student.shape
    padded_s, padded_t = (max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (student, teacher))
    acc = accumulator(student, teacher)
    block = score_block(student.element_size())
    tiles = -(-length // block)
    launch: dict[str, Any] = {
        "DS": width, "DSP": padded_s, "DT": teacher.shape[-1], "DTP": padded_t,
        "TILES": tiles, "BLOCK": block,
        "BIAS_S": bias_s is not None, "BIAS_T": bias_t is not None, "UPCAST": INTERPRETED,
        "ACC": tl.float64 if acc == torch.float64 else tl.float32,
        **register_limit(255),
    }  # fmt: skip
    wide = max(padded_s, padded_t) > 64  # at the limit of registers: tuned until none spills
    launch |= {"num_warps": 8, "num_stages": 2} if wide else {"num_warps": 4}
    return launch, (batch * heads * tiles,)


def score_block(element_size: int) -> int:
    """Queries and keys of a tile: as large as registers allow without spilling."""
    return 32 if element_size == 2 else 16
