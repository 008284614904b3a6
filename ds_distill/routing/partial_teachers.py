"""Teachers that know some of the task's classes.

T teachers, n rows, C classes, K of them known to a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ds_distill.types import Signals

Classes = Mapping[str, torch.Tensor]
"""By partial teacher: int64 [K], ascending, the class ids of its logits. Others know all."""


def classes_of(signals: Mapping[str, Signals]) -> dict[str, torch.Tensor]:
    """The classes of the partial teachers among these."""
    return {name: of.classes for name, of in signals.items() if of.classes is not None}


def unknown_to_all(teachers: Sequence[str], classes: Classes, count: int) -> list[int]:
    """The class ids that none of the teachers knows."""
    if any(name not in classes for name in teachers):
        return []
    known = {number for name in teachers for number in classes[name].tolist()}
    return [number for number in range(count) if number not in known]


def unknown_rows(
    reported: torch.Tensor, teachers: Sequence[str], classes: Classes, count: int
) -> torch.Tensor:
    """Of which rows some teachers say something, and of a class none that knows it: bool [n].
    reported: bool [T, n]."""
    knows = torch.ones(len(teachers), count, device=reported.device)
    for row, name in zip(knows, teachers, strict=True):
        if name in classes:
            row.zero_()[classes[name]] = 1.0
    return reported.any(dim=0) & (reported.T.float() @ knows == 0).any(dim=1)


def own_examples(
    logits: torch.Tensor, truth: torch.Tensor, classes: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples whose class a teacher knows: its logits [m, K], and the column of each class.

    logits: [N, K]. truth: int64 [N], class ids of `count` classes.
    """
    if classes is None:
        return logits, truth
    columns = torch.full((count,), -1)
    columns[classes] = torch.arange(len(classes))
    own = columns[truth]
    return logits[own >= 0], own[own >= 0]


def knowing_average(
    log_probs: Mapping[str, torch.Tensor],
    classes: Classes,
    count: int,
    reported: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log of the mean probability of each of `count` classes over the teachers that know it,
    normalised: [n, C].

    log_probs: by teacher, [n, C], of partial teachers [n, K]; finite. Each class is known to one.
    reported: of partial teachers, bool [T, n] in the order of `log_probs`: who counts. None: all.
    """
    names = sorted(log_probs)  # a sum in floats depends on its order
    if not classes:
        together = torch.stack([log_probs[name] for name in names]).logsumexp(dim=0)
        return torch.log_softmax(together, dim=1)
    first = log_probs[names[0]]
    ones = first.new_ones(len(names), len(first), 1)
    counts = dict(
        zip(log_probs, ones if reported is None else reported[:, :, None].float(), strict=True)
    )
    total, times = first.new_zeros(2, len(first), count)
    for name in names:
        own = classes.get(name)
        columns = torch.arange(count, device=first.device) if own is None else own
        total[:, columns] += counts[name] * log_probs[name].exp()
        times[:, columns] += counts[name]
    return torch.log_softmax((total / times).log(), dim=1)
