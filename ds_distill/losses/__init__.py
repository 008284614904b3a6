"""Loss terms, one file per family. Begin with `term`, what a term is; `build_terms` makes a phase's
terms from its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from ds_distill.losses.attention import AttentionKL, AttentionMSE, RelationKL
from ds_distill.losses.hidden import ActivationBoundary, Cosine, HiddenMSE
from ds_distill.losses.logits import (
    KL,
    MSE,
    ConfidencePenalty,
    CrossEntropy,
    LogitMSE,
    TeacherCrossEntropy,
)
from ds_distill.losses.term import Term, TermInputs
from ds_distill.recipe.terms import TERMS, TermSettings
from ds_distill.seen import Seen

__all__ = [
    "KL",
    "MSE",
    "ActivationBoundary",
    "AttentionKL",
    "AttentionMSE",
    "ConfidencePenalty",
    "Cosine",
    "CrossEntropy",
    "HiddenMSE",
    "LogitMSE",
    "RelationKL",
    "Seen",
    "TeacherCrossEntropy",
    "Term",
    "TermInputs",
    "build_terms",
]


def build_terms(losses: Mapping[str, TermSettings], inputs: TermInputs) -> dict[str, Term]:
    """The terms of a recipe's `losses`, by name, in the order of `TERMS`."""
    return {
        name: term.load()(losses[name], inputs) for name, term in TERMS.items() if name in losses
    }
