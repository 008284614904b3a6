"""Any number of labels per example, as losses on logits see them: each label of an example is a
row, of two classes or of its logit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ds_distill.routing import Target
from ds_distill.routing.label_rows import two_classes
from ds_distill.types import Batch, Signals


def rows_of_labels(
    student: Signals,
    teachers: Mapping[str, Signals],
    target: Target | None,
    batch: Batch,
    two: bool = True,
) -> tuple[Signals, dict[str, Signals], Target | None, Batch]:
    """What a term reads, with n * L rows of one label in place of n rows of L labels, label after
    label.

    two: each row has two classes: cross-entropy is then binary cross-entropy, and a KL is that of
        two sigmoids. Else it has the label's logit alone, [n * L, 1], so that a difference of
        logits is not halved by that of absences, which are 0 in all models.
    batch: labels int64 [n, L], 0 or 1 (-100 unknown). Hidden states are left out: they belong to
        examples. Row sets and their counts are of the new rows.
    """
    many = batch.labels.shape[1]

    def rows_of(logits: torch.Tensor) -> torch.Tensor:
        return two_classes(logits).flatten(0, 1) if two else logits.reshape(-1, 1)

    def signals(of: Signals) -> Signals:
        if of.classes is not None:
            raise ValueError(
                "a teacher of some of the labels needs examples with one label each, and here "
                "each has any number of labels"
            )
        given = None if of.given is None else of.given.repeat_interleave(many)
        # Beside a term on states alone a teacher is not asked for logits.
        output = None if of.output is None else rows_of(of.logits)
        return replace(of, output=output, hidden={}, given=given)

    if target is not None:
        logits = None if target.logits is None else rows_of(target.logits)
        target = Target(logits, target.weights.flatten(1))  # [T, n, L]: each label has its own
    each = torch.arange(many, device=batch.labels.device)
    rows = replace(
        batch,
        keys=batch.keys.repeat_interleave(many, dim=0),
        labels=batch.labels.flatten(),
        row_sets={
            name: (rows[:, None] * many + each).flatten() for name, rows in batch.row_sets.items()
        },
        counts={name: count * many for name, count in batch.counts.items()},
        teacher_ids=None,  # the target is made
    )
    return signals(student), {name: signals(of) for name, of in teachers.items()}, target, rows
