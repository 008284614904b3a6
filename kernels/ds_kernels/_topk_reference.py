"""`_topk` in plain PyTorch, a bounded number of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ._divergences import reference_relative_entropy
from ._shared import above_tolerance, accumulator, hinge, indices, row_parts
from ._tiles import programs

_REFERENCE_ELEMENTS = 1 << 18


def _teacher(
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


def reference_forward(
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
    number = programs(rows, num_rows)[0]
    losses = torch.zeros(number, dtype=acc, device=student.device)
    stats = torch.zeros(number, 3, dtype=acc, device=student.device)
    for part, of in row_parts(rows, num_rows, max(1, _REFERENCE_ELEMENTS // width)):
        x = student[of].to(acc) * inverse_t
        columns = ids[of].long()
        _check_distinct(columns, torch.arange(num_rows, device=x.device)[of])
        entries, rest = _teacher(log_probs[of], columns, tail[of], acc)
        own = x.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -float("inf"))
        # Absent entries point at one extra column.
        x = torch.cat((x, x[:, :1]), 1)
        x.scatter_(1, torch.where(columns < 0, width, columns), -float("inf"))
        lse_rest = torch.logsumexp(x[:, :-1], 1, keepdim=True)
        lse = torch.logsumexp(torch.cat((own, lse_rest), 1), 1, keepdim=True)
        log_p, log_q = torch.cat((entries, rest), 1), torch.cat((own, lse_rest), 1) - lse
        value = reference_relative_entropy(log_p.exp(), log_q.exp(), log_p - log_q)
        losses[part] = hinge(value.sum(1).mul_(factor), tolerance)
        stats[part, 1:] = torch.cat((lse, lse_rest), 1)
    return losses, stats


def reference_backward(
    upstream: Tensor,
    student: Tensor,
    log_probs: Tensor,
    ids: Tensor,
    tail: Tensor,
    losses: Tensor,
    stats: Tensor,
    rows: Tensor | None,
    inverse_t: float,
    factor: float,
) -> list[Tensor]:
    width = student.shape[1]
    gradient = torch.zeros(student.shape, dtype=student.dtype, device=student.device)
    size = max(1, _REFERENCE_ELEMENTS // width)
    listed = indices(rows)
    for part in above_tolerance(losses).nonzero().squeeze(1).split(size):
        of = part if listed is None else listed[part]
        x = student[of].to(losses.dtype) * inverse_t
        columns = ids[of].long()
        entries, rest = _teacher(log_probs[of], columns, tail[of], losses.dtype)
        lse, lse_rest = stats[part, 1:].T[..., None]
        q = torch.exp(x - lse)
        slope = q - torch.exp(rest + (x - lse_rest))
        inside = q.gather(1, columns.clamp(min=0)) - entries.exp()
        slope = torch.cat((slope, slope[:, :1]), 1)
        slope.scatter_(1, torch.where(columns < 0, width, columns), inside)
        scale = upstream[part, None] * factor
        gradient[of] = slope[:, :-1].mul_(scale).to(student.dtype)
    return [gradient]
