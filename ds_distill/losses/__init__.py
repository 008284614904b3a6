"""Loss terms, one file per family. `build_terms` makes a phase's terms from its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from ds_distill.losses.hidden import HiddenMSE
from ds_distill.losses.logits import KL, CrossEntropy, LogitMSE
from ds_distill.losses.term import Term
from ds_distill.recipe.phases import Losses

__all__ = ["KL", "CrossEntropy", "HiddenMSE", "LogitMSE", "Term", "build_terms"]


def build_terms(
    losses: Losses, student_width: int, teacher_widths: Mapping[str, int]
) -> dict[str, Term]:
    """The terms of a recipe's `losses`, by name.

    student_width, teacher_widths: hidden sizes, for the terms that project.
    """
    terms: dict[str, Term] = {}
    if losses.cross_entropy:
        terms["cross_entropy"] = CrossEntropy(losses.cross_entropy)
    if losses.kl:
        terms["kl"] = KL(losses.kl)
    if losses.logit_mse:
        terms["logit_mse"] = LogitMSE(losses.logit_mse)
    if losses.hidden_mse:
        terms["hidden_mse"] = HiddenMSE(losses.hidden_mse, student_width, teacher_widths)
    return terms
