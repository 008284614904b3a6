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
    log_probs: Mapping[str, torch.Tensor], classes: Classes, count: int
) -> torch.Tensor:
    """Log of the mean probability of each of `count` classes over the teachers that know it,
    normalised: [n, C].

    log_probs: by teacher, [n, C], of partial teachers [n, K]; finite. Each class is known to one.
    """
    names = sorted(log_probs)  # a sum in floats depends on its order
    if not classes:
        together = torch.stack([log_probs[name] for name in names]).logsumexp(dim=0)
        return torch.log_softmax(together, dim=1)
    first = log_probs[names[0]]
    total, times = first.new_zeros(len(first), count), first.new_zeros(count)
    for name in names:
        own = classes.get(name)
        columns = torch.arange(count, device=first.device) if own is None else own
        total[:, columns] += log_probs[name].exp()
        times[columns] += 1
    return torch.log_softmax((total / times).log(), dim=1)
