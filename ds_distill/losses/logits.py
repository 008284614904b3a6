"""Terms on logits: cross-entropy with the label, KL and MSE with the teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ds_distill.losses.term import DEFAULTS, Term, only_teacher, target_loss
from ds_distill.parts.terms import CrossEntropyLoss, KLLoss, LogitMSELoss
from ds_distill.routing import Target
from ds_distill.types import Batch, Signals, VocabularyHead
from ds_kernels import linear_kl, linear_mse, masked_kl, topk_kl


class CrossEntropy(Term):
    """-log softmax(z_s)[label] on labelled rows: the student loss of every method."""

    rows = "labelled"
    needs_teachers = False

    def __init__(self, settings: CrossEntropyLoss | Mapping[str, Any] = DEFAULTS) -> None:
        """settings: as a recipe has them, e.g. {"weight": 0.5}."""
        super().__init__(CrossEntropyLoss.model_validate(settings))

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        target: Target | None,
        batch: Batch,
    ) -> torch.Tensor:
        rows = batch.row_sets[self.rows]
        logits, labels = student.at(rows).logits.float(), batch.labels[rows]
        return self.weight * F.cross_entropy(logits, labels, reduction="none")


class KL(Term):
    """max(weight * T^2 * KL(softmax(z_t / T) || softmax(z_s / T)) - tolerance, 0) per row
    (Hinton et al. 2015; the tolerance is VE-KD's, per row)."""

    def __init__(self, settings: KLLoss | Mapping[str, Any] = DEFAULTS) -> None:
        """settings: as a recipe has them, e.g. {"temperature": 2.0}."""
        self._settings = KLLoss.model_validate(settings)
        super().__init__(self._settings)

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        target: Target | None,
        batch: Batch,
    ) -> torch.Tensor:
        student, teachers, target = self.at_rows(student, teachers, target, batch)
        options: dict[str, Any] = {
            "temperature": self._settings.temperature,
            "weight": self._settings.weight,
            "tolerance": self._settings.tolerance,
            "reduction": "none",
        }
        heads = _vocabulary_heads(student, teachers, target)
        if heads is not None:
            return _linear(linear_kl, *heads, options)

        if target is None:
            teacher = only_teacher(teachers)
            if teacher.top is not None:
                top = teacher.top
                return topk_kl(student.logits, top.log_probs, top.ids, top.tail_log_prob, **options)

        def loss(teacher_logits: torch.Tensor) -> torch.Tensor:
            return masked_kl(student.logits, teacher_logits, **options)

        return target_loss(loss, teachers, target)


def _vocabulary_heads(
    student: Signals, teachers: Mapping[str, Signals], target: Target | None
) -> tuple[VocabularyHead, VocabularyHead] | None:
    """Heads of the student and of the only teacher, where a loss can be taken on them."""
    if target is not None or student.head is None:
        return None
    teacher = only_teacher(teachers)
    return None if teacher.head is None else (student.head, teacher.head)


def _linear(
    loss: Callable[..., torch.Tensor],
    student: VocabularyHead,
    teacher: VocabularyHead,
    options: dict[str, Any],
) -> torch.Tensor:
    """A loss over a vocabulary without [k, V] logits of either model."""
    return loss(
        student.features,
        student.weight,
        teacher.features,
        teacher.weight,
        student_bias=student.bias,
        teacher_bias=teacher.bias,
        **options,
    )


class LogitMSE(Term):
    """mean over classes of (z_t - z_s)^2."""

    def __init__(self, settings: LogitMSELoss | Mapping[str, Any] = DEFAULTS) -> None:
        """settings: as a recipe has them, e.g. {"weight": 0.5}."""
        super().__init__(LogitMSELoss.model_validate(settings))

    def forward(
        self,
        student: Signals,
        teachers: Mapping[str, Signals],
        target: Target | None,
        batch: Batch,
    ) -> torch.Tensor:
        student, teachers, target = self.at_rows(student, teachers, target, batch)
        heads = _vocabulary_heads(student, teachers, target)
        if heads is not None:
            options = {"weight": self.weight / len(heads[0].bias), "reduction": "none"}
            return _linear(linear_mse, *heads, options)
        logits = student.logits.float()

        def loss(teacher_logits: torch.Tensor) -> torch.Tensor:
            return self.weight * (logits - teacher_logits.float()).square().mean(dim=-1)

        return target_loss(loss, teachers, target)
