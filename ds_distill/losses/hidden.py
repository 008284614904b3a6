"""Terms on hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_distill.losses.term import Term
from ds_distill.parts.terms import HiddenMSELoss
from ds_distill.routing import Target
from ds_distill.types import Batch, Signals


class HiddenMSE(Term):
    """sum over teachers t of MSE(H_t, W_t H_s) on the last layer's state of each row, W_t
    trained (MT-BERT's multi-teacher hidden loss)."""

    layers = (-1,)

    def __init__(
        self,
        settings: HiddenMSELoss | Mapping[str, Any],
        student_width: int,
        teacher_widths: Mapping[str, int],
    ) -> None:
        """
        settings: as a recipe has them, e.g. {"weight": 0.5}.
        student_width, teacher_widths: hidden sizes, of the teachers by name.
        """
        super().__init__(HiddenMSELoss.model_validate(settings))
        self.projections = nn.ModuleDict(
            {
                name: nn.Linear(student_width, width, bias=False)
                for name, width in teacher_widths.items()
            }
        )

    @classmethod
    def build(
        cls, settings: HiddenMSELoss, student_width: int, teacher_widths: Mapping[str, int]
    ) -> HiddenMSE:
        return cls(settings, student_width, teacher_widths)

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        target: Target | None,
        batch: Batch,
    ) -> torch.Tensor:
        student, teachers, _ = self.at_rows(student, teachers, None, batch)
        state = student.hidden[-1]
        total = torch.zeros(len(state), device=state.device)
        for name, projection in self.projections.items():
            if name not in teachers or -1 not in teachers[name].hidden:
                raise ValueError(
                    f"hidden_mse reads the last layer's states of teacher {name!r}, and the batch "
                    "has none: cache them (hidden: [-1]), or give the bundle the teacher"
                )
            difference = projection(state).float() - teachers[name].hidden[-1].float()
            total = total + difference.square().mean(dim=-1)
        return self.weight * total

    def idle(self, student: Signals) -> torch.Tensor:
        state = student.hidden[-1]
        return torch.stack([project(state).sum() for project in self.projections.values()]).sum()
