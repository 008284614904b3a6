"""The siblings of `masked_kl`: other divergences of the same logits, by the same kernels."""

from __future__ import annotations

from torch import Tensor

from ._divergences import JS, REVERSE_KL, TV
from .masked_kl import masked_divergence


def masked_reverse_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """As `masked_kl` with KL(student || teacher): Wen et al. 2023, "f-Divergence Minimization
    for Sequence-Level Knowledge Distillation", on tokens."""
    return masked_divergence(
        "masked_reverse_kl", REVERSE_KL, student_logits, teacher_logits, mask,
        temperature, weight, tolerance, reduction,
    )  # fmt: skip


def masked_js(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """As `masked_kl` with the Jensen-Shannon divergence (KL(p || m) + KL(q || m)) / 2,
    m = (p + q) / 2: Wen et al. 2023, "f-Divergence Minimization for Sequence-Level Knowledge
    Distillation", on tokens."""
    return masked_divergence(
        "masked_js", JS, student_logits, teacher_logits, mask,
        temperature, weight, tolerance, reduction,
    )  # fmt: skip


def masked_tv(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    weight: float = 1.0,
    tolerance: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """As `masked_kl` with the total variation distance sum |p - q| / 2: Wen et al. 2023,
    "f-Divergence Minimization for Sequence-Level Knowledge Distillation", on tokens. Where
    p = q for a column its derivative is taken as 0."""
    return masked_divergence(
        "masked_tv", TV, student_logits, teacher_logits, mask,
        temperature, weight, tolerance, reduction,
    )  # fmt: skip
