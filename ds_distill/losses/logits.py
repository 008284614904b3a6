"""Terms on logits: cross-entropy or MSE with the label, KL and MSE with the teachers, and the
teachers' cross-entropy with the label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ds_distill.losses.term import (
    DEFAULTS,
    NO_INPUTS,
    Term,
    TermInputs,
    only_teacher,
    target_loss,
)
from ds_distill.reads import Reads
from ds_distill.recipe.terms import (
    ConfidencePenaltyLoss,
    CrossEntropyLoss,
    KLLoss,
    LogitMSELoss,
    MSELoss,
    TeacherCrossEntropyLoss,
)
from ds_distill.seen import Seen
from ds_distill.types import VocabularyHead
from ds_kernels import (
    linear_cross_entropy,
    linear_kl,
    masked_kl,
)


class CrossEntropy(Term):
    """-w[label] * log softmax(z_s)[label] on labelled rows: the student loss of every method. Class
    weights w, if there are any, have mean 1 over the training examples."""

    kind = CrossEntropyLoss
    rows = "labelled"
    needs_teachers = False

    def __init__(
        self,
        settings: CrossEntropyLoss | Mapping[str, Any] = DEFAULTS,
        inputs: TermInputs = NO_INPUTS,
    ) -> None:
        """
        settings: as a recipe has them, e.g. {"weight": 0.5}.
        inputs: the labels, and the counts of their examples; for class weights.

        Raises ValueError when there are class weights, and no counts or a label without a class.
        """
        super().__init__(settings)
        given = self.settings.class_weights
        # Not a buffer: an engine in bf16 would round it.
        self._class_weights = _class_weights(given, inputs.labels, inputs.class_counts)

    def forward(self, seen: Seen) -> torch.Tensor:
        rows = seen.batch.row_sets[self.rows]
        student, labels = seen.student.at(rows), seen.batch.labels[rows]
        if labels.is_floating_point():
            raise ValueError("cross_entropy needs class ids, and these labels are numbers: use mse")
        if self._class_weights is not None and self._class_weights.device != labels.device:
            self._class_weights = self._class_weights.to(labels.device)
        head, weights = student.head, self._class_weights
        if (
            head is not None
            and is_large(len(student), head.entries, head.features.device.type)
            and _no_logits(seen)
        ):
            losses = _of_head(head, labels, weights)
        else:
            logits = student.logits.float()
            losses = F.cross_entropy(logits, labels, weights, reduction="none")
        return self.weight * losses


LOGIT_BYTES = {"cuda": 1 << 29, "cpu": 1 << 25}
"""Of float32 logits that are kept for the backward pass, by device. Softmax and gradient are as
large again each: on a CPU these are all together as much as `linear_kl` holds at a time."""


def is_large(rows: int, vocabulary: int, device: str) -> bool:
    """Whether logits are too many to keep them: they are computed again in the backward pass, a
    third more work."""
    return rows > max(1, LOGIT_BYTES.get(device, LOGIT_BYTES["cpu"]) // (4 * vocabulary))


def _no_logits(seen: Seen) -> bool:
    """Whether no term against the teachers makes the student's logits, which one on labels then
    shares: as `_vocabulary_heads` has it."""
    return seen.target is None and all(
        teacher.output is None or teacher.head is not None for teacher in seen.teachers.values()
    )


def _of_head(
    head: VocabularyHead, labels: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Cross-entropy [k] without [k, V] logits."""
    losses, slot = linear_cross_entropy(head.features, head.weight, labels, student_bias=head.bias)
    head.slots.append(slot)
    return losses if weights is None else losses * weights[labels]


def _class_weights(
    given: Literal["balanced"] | Mapping[str, float] | None,
    labels: Sequence[str],
    class_counts: Sequence[int],
) -> torch.Tensor | None:
    """float32 [C], with mean 1 over the training examples; None where no weights are given."""
    if given is None:
        return None
    counts = torch.tensor(class_counts, dtype=torch.float64)
    if not counts.sum() > 0:
        raise ValueError("class_weights needs class_counts: the training examples of each class")
    if given == "balanced":
        weights = 1 / counts.clamp(min=1)
    else:
        unknown = [label for label in given if label not in labels]
        if unknown or len(labels) != len(counts):
            raise ValueError(
                f"class_weights of {', '.join(given)}: `labels` must name these and all other "
                f"classes, one for each of class_counts; they are {', '.join(labels)}"
            )
        weights = torch.tensor([given.get(label, 1.0) for label in labels], dtype=torch.float64)
    return (weights * counts.sum() / (weights * counts).sum()).float()


class MSE(Term):
    """(z_s - y)^2 on labelled rows, z_s the student's number and y the label."""

    kind = MSELoss
    rows = "labelled"
    needs_teachers = False

    def forward(self, seen: Seen) -> torch.Tensor:
        rows = seen.batch.row_sets[self.rows]
        numbers, labels = seen.student.at(rows).logits.float(), seen.batch.labels[rows]
        if numbers.shape[1] != 1 or not labels.is_floating_point():
            raise ValueError(
                "mse needs a student with one output and labels that are numbers (float); here are "
                f"{numbers.shape[1]} outputs and labels of {labels.dtype}"
            )
        return self.weight * (numbers[:, 0] - labels).square()


class TeacherCrossEntropy(Term):
    """mean over teachers t of -log softmax(z_t)[label] on labelled rows; of teachers that know some
    of the classes, or say nothing of some rows, over those that know the label. Without a gradient,
    because teachers are frozen (A. B. Hossain's thesis, 4.11, experiment 3)."""

    kind = TeacherCrossEntropyLoss
    rows = "labelled"
    reads = Reads(logits=False)

    def teacher_reads(self, teacher: str) -> Reads:
        return Reads()

    def forward(self, seen: Seen) -> torch.Tensor:
        labels = seen.batch.labels[seen.batch.row_sets[self.rows]]
        losses, known = [], []
        for teacher in seen.at(self.rows).teachers.values():
            if teacher.classes is None:
                columns, knows = labels, labels >= 0
            else:
                is_label = teacher.classes == labels[:, None]
                columns, knows = is_label.int().argmax(dim=1), is_label.any(dim=1)
            if teacher.reported is not None:
                knows = knows & teacher.reported
            own = F.cross_entropy(teacher.logits.float(), columns, reduction="none")
            losses.append(torch.where(knows, own, 0.0))
            known.append(knows)
        count = torch.stack(known).sum(dim=0).clamp(min=1)
        return self.weight * torch.stack(losses).sum(dim=0) / count


class KL(Term):
    """max(weight * T^2 * KL(softmax(z_t / T) || softmax(z_s / T)) - tolerance, 0)
    (Hinton et al. 2015; the tolerance is VE-KD's), or with another divergence in the place of KL:
    reverse, Jensen-Shannon, total variation (Wen et al. 2023, f-divergence minimization for
    sequence-level knowledge distillation, section 3). Both softmaxes are over the classes that the
    teacher knows."""

    kind = KLLoss

    def forward(self, seen: Seen) -> torch.Tensor:
        options: dict[str, Any] = {
            "divergence": self.settings.divergence,
            "temperature": self.settings.temperature,
            "weight": self.weight,
            "reduction": "none",
        }
        if self.settings.divergence == "kl" and (heads := _vocabulary_heads(seen)):
            return self.tolerated(_of_heads(*heads, self.counted(seen), options))
        loss = partial(masked_kl, **options)
        return self.tolerated(target_loss(loss, seen.at(self.rows)))


def _vocabulary_heads(seen: Seen) -> tuple[VocabularyHead, VocabularyHead] | None:
    """Heads of the student and of the only teacher, where a loss can be taken on them."""
    if seen.target is not None or seen.student.head is None:
        return None
    teacher = only_teacher(seen.teachers)
    return None if teacher.head is None else (seen.student.head, teacher.head)


def _of_heads(
    student: VocabularyHead,
    teacher: VocabularyHead,
    rows: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """A loss [k] over a vocabulary without logits [k, V] of either; over the teacher's entries,
    where the student has more."""
    return linear_kl(
        student.features,
        student.weight,
        teacher.features,
        teacher.weight,
        rows,
        student_bias=student.bias,
        teacher_bias=teacher.bias,
        entries=teacher.entries,
        slot=student.slots[-1] if student.slots else None,
        **options,
    )


class LogitMSE(Term):
    """mean over the classes that the teacher knows of (z_t - z_s)^2; of many labels over these."""

    kind = LogitMSELoss
    label_rows = "logit"

    def forward(self, seen: Seen) -> torch.Tensor:
        if heads := _vocabulary_heads(seen):
            weight = self.weight / heads[1].entries
            options = {"divergence": "mse", "weight": weight, "reduction": "none"}
            return self.tolerated(_of_heads(*heads, self.counted(seen), options))

        def loss(own: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return self.weight * (own.float() - wanted.float()).square().mean(dim=-1)

        return self.tolerated(target_loss(loss, seen.at(self.rows)))


class ConfidencePenalty(Term):
    """-weight * H(softmax(z_s)), with H(p) = -sum over classes of p log p (Pereyra et al. 2017;
    DoKTra, equation 2)."""

    kind = ConfidencePenaltyLoss
    needs_teachers = False

    def forward(self, seen: Seen) -> torch.Tensor:
        logits = seen.student.at(seen.batch.row_sets[self.rows]).logits
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        return self.weight * (log_probs.exp() * log_probs).sum(dim=-1)
