"""What `_scores` computes, in plain PyTorch: a bounded number of scores at a time.

Shapes: B batch, A heads, S positions, D head width. `Scores`: query and key [B, A, S, D], and the
factor of their products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._divergences import reference_log_ratio, reference_relative_entropy, reference_softmax
from ._shared import empty_like_heads, hinge

Scores = tuple[Tensor, Tensor, float]
_REFERENCE_ELEMENTS = 1 << 18


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
    query: Tensor, key: Tensor, scale: float, span: Any, acc: torch.dtype
) -> Tensor:
    example, heads, queries, keys = span
    q, k = query[example, heads][:, queries].to(acc), key[example, heads][:, keys].to(acc)
    return torch.baddbmm(q.new_zeros(()), q, k.mT, beta=0, alpha=scale)


def reference_forward(
    student: Scores,
    teacher: Scores,
    valid: Tensor,
    weight: float,
    tolerance: float,
    losses: Tensor,
    stats: Tensor,
) -> None:
    """Fill losses [B, A, S] and both log-sum-exps, stats [2, B, A, S]; both are 0 before."""
    query = student[0]
    with torch.autocast(query.device.type, enabled=False):
        for span in _spans(valid, query.shape[1]):
            s = _reference_scores(*student, span, stats.dtype)
            t = _reference_scores(*teacher, span, stats.dtype)
            (q, s_lse), (p, t_lse) = reference_softmax(s), reference_softmax(t)
            value = reference_relative_entropy(p, q, reference_log_ratio(s, t, s_lse, t_lse))
            example, head, queries, _ = span
            losses[example, head, queries] = hinge(value.sum(-1).mul_(weight), tolerance)
            stats[:, example, head, queries] = torch.stack((s_lse[..., 0], t_lse[..., 0]))


def reference_backward(
    student: Scores,
    teacher: Scores,
    valid: Tensor,
    scale: Tensor,
    stats: Tensor,
    symmetric: bool,
) -> list[Tensor]:
    """Gradients of the student's query and key, in the dtype of `stats`; the same one, of both,
    where they are one tensor. scale: of each row's loss, [B, A, S]."""
    query, key, scale_s = student
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
