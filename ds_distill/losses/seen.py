"""What a loss term sees of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ds_distill.routing import Target
from ds_distill.routing.label_rows import two_classes
from ds_distill.types import Batch, Signals


@dataclass(frozen=True)
class Seen:
    """A batch, and what models say of its n rows."""

    student: Signals
    batch: Batch
    teachers: Mapping[str, Signals] = field(default_factory=dict)
    target: Target | None = None
    """None without a router: then there is one teacher, or none."""

    def at(self, name: str) -> Seen:
        """The same, with what models say at the k rows of a row set alone, which may be empty."""
        rows = self.batch.row_sets[name]
        teachers = {teacher: signals.at(rows) for teacher, signals in self.teachers.items()}
        target = None if self.target is None else self.target.at(rows)
        return Seen(self.student.at(rows), self.batch, teachers, target)

    def by_label(self, two: bool = True) -> Seen:
        """Where examples have any number of labels: n * L rows of one label in place of n rows of L
        labels, label after label.

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
            given = None if of.given is None else of.given.repeat_interleave(many)
            # Beside a term on states alone a teacher is not asked for logits.
            output = None if of.output is None else rows_of(of.logits)
            return replace(of, output=output, hidden={}, given=given)

        if target is not None:
            logits = None if target.logits is None else rows_of(target.logits)
            target = Target(logits, target.weights.flatten(1))  # [T, n, L]: each label has its own
        each = torch.arange(many, device=batch.labels.device)
        batch = replace(
            batch,
            keys=batch.keys.repeat_interleave(many, dim=0),
            labels=batch.labels.flatten(),
            row_sets={
                name: (rows[:, None] * many + each).flatten()
                for name, rows in batch.row_sets.items()
            },
            counts={name: count * many for name, count in batch.counts.items()},
            teacher_ids=None,  # the target is made
        )
        teachers = {name: signals(of) for name, of in self.teachers.items()}
        return Seen(signals(self.student), batch, teachers, target)
