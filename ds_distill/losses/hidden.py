"""Terms on hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from ds_distill.losses.term import DEFAULTS, Term, TermInputs
from ds_distill.models.named import NamedModules
from ds_distill.parts.terms import ActivationBoundaryLoss, CosineLoss, HiddenMSELoss
from ds_distill.routing import Target
from ds_distill.types import Batch, Signals
from ds_kernels import masked_cosine


class HiddenMSE(Term):
    """sum over teachers t of MSE(H_t, W_t H_s) on the last layer's state of each row, W_t
    trained (MT-BERT's multi-teacher hidden loss)."""

    student_layers = (-1,)
    reads_logits = False
    label_rows = None

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
        self.projections = NamedModules(
            {
                name: nn.Linear(student_width, width, bias=False)
                for name, width in teacher_widths.items()
            }
        )

    @classmethod
    def build(cls, settings: HiddenMSELoss, inputs: TermInputs) -> HiddenMSE:
        return cls(settings, inputs.student_width, inputs.teacher_widths)

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
            if name not in teachers:
                raise ValueError(f"hidden_mse projects to teacher {name!r}, which the batch lacks")
            wanted = _last_state("hidden_mse", name, teachers[name]).float()
            total = total + (projection(state).float() - wanted).square().mean(dim=-1)
        return self.weight * total

    def idle(self, student: Signals) -> torch.Tensor:
        state = student.hidden[-1]
        return torch.stack([project(state).sum() for project in self.projections.values()]).sum()


class Cosine(Term):
    """1 - cos(H_t, H_s) of the last layer's state of each row, with one teacher (Sanh et al. 2019,
    DistilBERT)."""

    student_layers = (-1,)
    reads_logits = False
    label_rows = None

    def __init__(self, settings: CosineLoss | Mapping[str, Any] = DEFAULTS) -> None:
        """settings: as a recipe has them, e.g. {"weight": 0.5}."""
        super().__init__(CosineLoss.model_validate(settings))

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        target: Target | None,
        batch: Batch,
    ) -> torch.Tensor:
        student, teachers, _ = self.at_rows(student, teachers, None, batch)
        state = _lone_state("cosine", teachers)
        return masked_cosine(student.hidden[-1], state, weight=self.weight, reduction="none")


class ActivationBoundary(Term):
    """||rho(t) * relu(mu - s) + (1 - rho(t)) * relu(mu + s)||^2 with rho(x) = 1 where x > 0, on the
    last layer's state of each row, with one teacher (DoKTra, equation 5; Heo et al. 2019).

    t is the teacher's state, or where widths differ its image under a map that is drawn from the
    seed and not trained.
    """

    student_layers = (-1,)
    reads_logits = False
    label_rows = None
    map: torch.Tensor | None
    """float32 [student's width, teacher's width]; None between equal widths."""

    def __init__(
        self,
        settings: ActivationBoundaryLoss | Mapping[str, Any],
        student_width: int,
        teacher_width: int,
        seed: int = 0,
    ) -> None:
        """
        settings: as a recipe has them, e.g. {"weight": 0.001}.
        student_width, teacher_width: hidden sizes.
        seed: of the map.
        """
        settings = ActivationBoundaryLoss.model_validate(settings)
        super().__init__(settings)
        self._margin = settings.margin
        drawn = None
        if student_width != teacher_width:
            own = xxhash.xxh64_intdigest(b"activation_boundary %d" % seed) >> 1
            generator = torch.Generator("cpu").manual_seed(own)
            drawn = torch.randn(student_width, teacher_width, generator=generator, device="cpu")
            drawn /= teacher_width**0.5
        self.register_buffer("map", drawn)

    @classmethod
    def build(cls, settings: ActivationBoundaryLoss, inputs: TermInputs) -> ActivationBoundary:
        [width] = inputs.teacher_widths.values()
        return cls(settings, inputs.student_width, width, inputs.seed)

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        target: Target | None,
        batch: Batch,
    ) -> torch.Tensor:
        state, above = self._sides(student, teachers, batch)
        distance = self._margin - torch.where(above, state, -state)
        return self.weight * distance.relu().square().sum(dim=-1)

    def measures(
        self, student: Signals, teachers: Mapping[str, Signals], batch: Batch
    ) -> dict[str, torch.Tensor]:
        """`other_sign`: the share of neurons on the other side of 0 than the teacher's (equation 4
        counts them)."""
        state, above = self._sides(student, teachers, batch)
        return {"other_sign": ((state > 0) != above).float().mean(dim=-1)}

    def _sides(
        self, student: Signals, teachers: Mapping[str, Signals], batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The student's state, float32 [k, H], and where the teacher's is above 0, bool [k, H]."""
        student, teachers, _ = self.at_rows(student, teachers, None, batch)
        state = _lone_state("activation_boundary", teachers).float()
        if self.map is not None:
            state = nn.functional.linear(state, self.map.float())
        return student.hidden[-1].float(), state > 0


def _lone_state(term: str, teachers: Mapping[str, Signals]) -> torch.Tensor:
    """The last layer's states of the one teacher. Raises ValueError where it is not one, or has no
    states."""
    if len(teachers) != 1:
        raise ValueError(f"{term} takes one teacher, and here are {len(teachers)}")
    [(name, signals)] = teachers.items()
    return _last_state(term, name, signals)


def _last_state(term: str, name: str, signals: Signals) -> torch.Tensor:
    if -1 not in signals.hidden:
        raise ValueError(
            f"{term} reads the last layer's states of teacher {name!r}, and the batch has none: "
            "cache them (hidden: [-1]), or give the bundle the teacher"
        )
    return signals.hidden[-1]
