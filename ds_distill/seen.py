"""What loss terms and routing policies see of a batch, and what a policy makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from ds_distill.types import Batch, Signals


@dataclass(frozen=True)
class Target:
    """Whom each of n rows follows, of T teachers in the order of `Seen.teachers`."""

    logits: torch.Tensor | None
    """float32 [n, C]: softmax(logits / T) is the target. None where losses are mixed instead:
    then the loss is the sum over teachers of weight * loss against that teacher. Where an example
    has any number of L labels: [n, L], the logit of each."""
    weights: torch.Tensor
    """float32 [T, n]: how much each teacher is followed, 0 where it says nothing of a row; of many
    labels [T, n, L]."""

    def at(self, rows: torch.Tensor) -> Target:
        """The target of rows of a batch's row set, int64 [k]."""
        if len(rows) == self.weights.shape[1]:
            return self
        logits = None if self.logits is None else self.logits.index_select(0, rows)
        return Target(logits, self.weights.index_select(1, rows))


@dataclass(frozen=True)
class Seen:
    """A batch, and what models say of its n rows."""

    student: Signals
    batch: Batch
    teachers: Mapping[str, Signals] = field(default_factory=dict)
    target: Target | None = None
    """None without a router: then there is one teacher, or none."""

    @property
    def reported(self) -> torch.Tensor:
        """bool [T, n]: of which rows each teacher says something."""
        each = (
            torch.ones(len(of), dtype=torch.bool, device=self.batch.labels.device)
            if of.reported is None
            else of.reported
            for of in self.teachers.values()
        )
        return torch.stack([*each])

    def at(self, name: str) -> Seen:
        """The same, with what models say at the k rows of a row set alone, which may be empty."""
        rows = self.batch.row_sets[name]
        teachers = {teacher: signals.at(rows) for teacher, signals in self.teachers.items()}
        target = None if self.target is None else self.target.at(rows)
        return Seen(self.student.at(rows), self.batch, teachers, target)

    def by_label(self, two: bool = True) -> Self:
        """Where examples have any number of labels: n * L rows of one label in place of n rows of L
        labels, example after example.

        two: each row has two classes: cross-entropy is then binary cross-entropy, and a KL is that
            of two sigmoids. Else it has the label's logit alone, [n * L, 1], so that a difference
            of logits is not halved by that of absences, which are 0 in all models.

        Labels are int64 [n, L], 0 or 1 (-100 unknown). Hidden states are left out: they belong to
        examples. Row sets and their counts are of the new rows.
        """
        batch, target, many = self.batch, self.target, self.batch.labels.shape[1]

        def rows_of(logits: torch.Tensor) -> torch.Tensor:
            return two_classes(logits).flatten(0, 1) if two else logits.reshape(-1, 1)

        def signals(of: Signals) -> Signals:
            if of.classes is not None:
                raise ValueError(
                    "a teacher of some of the labels needs examples with one label each, and here "
                    "each has any number of labels"
                )
            reported = None if of.reported is None else of.reported.repeat_interleave(many)
            # Beside a term on states alone a teacher is not asked for logits.
            output = None if of.output is None else rows_of(of.logits)
            return replace(of, output=output, hidden={}, reported=reported)

        if target is not None:
            logits = None if target.logits is None else rows_of(target.logits)
            target = Target(logits, target.weights.flatten(1))  # [T, n, L]: each label has its own
        each = torch.arange(many, device=batch.labels.device)
        ids = batch.teacher_ids
        batch = replace(
            batch,
            keys=batch.keys.repeat_interleave(many, dim=0),
            labels=batch.labels.flatten(),
            row_sets={
                name: (rows[:, None] * many + each).flatten()
                for name, rows in batch.row_sets.items()
            },
            counts={name: count * many for name, count in batch.counts.items()},
            teacher_ids=None if ids is None else ids.repeat_interleave(many),
        )
        teachers = {name: signals(of) for name, of in self.teachers.items()}
        student = signals(self.student)
        return replace(self, student=student, batch=batch, teachers=teachers, target=target)


def two_classes(logits: torch.Tensor) -> torch.Tensor:
    """[...] -> [..., 2]: a label's logit z as the logits [0, z] of its absence and presence, whose
    softmax is sigmoid(z)."""
    return torch.stack([torch.zeros_like(logits), logits], dim=-1)
