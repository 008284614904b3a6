"""Terms on logits: cross-entropy with the label, KL and MSE with the teachers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ds_distill.losses.term import Term, routed_loss
from ds_distill.recipe.schema import CrossEntropyLoss, KLLoss, LogitMSELoss
from ds_distill.routing import Routed
from ds_distill.types import Batch, Signals
from ds_kernels import masked_kl


class CrossEntropy(Term):
    """-log softmax(z_s)[label] on labelled rows: the student loss of every method."""

    rows = "labelled"

    def __init__(self, settings: CrossEntropyLoss) -> None:
        super().__init__()
        self._weight = settings.weight

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        routed: Routed | None,
        batch: Batch,
    ) -> torch.Tensor:
        logits = student.logits.float()
        return self._weight * F.cross_entropy(logits, batch.labels, reduction="none")


class KL(Term):
    """max(weight * T^2 * KL(softmax(z_t / T) || softmax(z_s / T)) - tolerance, 0) per row
    (Hinton et al. 2015; the tolerance is VE-KD's, per row)."""

    def __init__(self, settings: KLLoss) -> None:
        super().__init__()
        self._settings = settings

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        routed: Routed | None,
        batch: Batch,
    ) -> torch.Tensor:
        assert routed is not None
        mask = batch.row_sets[self.rows]

        def loss(target: torch.Tensor) -> torch.Tensor:
            return masked_kl(
                student.logits,
                target,
                mask,
                temperature=self._settings.temperature,
                weight=self._settings.weight,
                tolerance=self._settings.tolerance,
                reduction="none",
            )

        return routed_loss(loss, teachers, routed)


class LogitMSE(Term):
    """mean over classes of (z_t - z_s)^2."""

    def __init__(self, settings: LogitMSELoss) -> None:
        super().__init__()
        self._weight = settings.weight

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        routed: Routed | None,
        batch: Batch,
    ) -> torch.Tensor:
        assert routed is not None
        logits = student.logits.float()

        def loss(target: torch.Tensor) -> torch.Tensor:
            return self._weight * (logits - target.float()).square().mean(dim=-1)

        return routed_loss(loss, teachers, routed)
