"""A masked-LM's losses go through linear ops: the same values, and no logits of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_distill.losses import KL, LogitMSE, Term
from ds_distill.parts.terms import KLLoss, LogitMSELoss
from ds_distill.types import Batch, Signals, VocabularyHead

ROWS, VOCABULARY = 7, 50


def head(width: int, seed: int, *, trained: bool) -> VocabularyHead:
    torch.manual_seed(seed)
    decoder = nn.Linear(width, VOCABULARY).requires_grad_(trained)
    return VocabularyHead(torch.randn(ROWS, width, requires_grad=trained), decoder, decoder)


def batch() -> Batch:
    counted = torch.arange(ROWS) != 2
    return Batch(
        keys=torch.zeros(ROWS, 2, dtype=torch.int64),
        views={},
        labels=torch.zeros(ROWS, dtype=torch.int64),
        row_sets={"all": counted, "labelled": counted},
    )


TERMS: dict[str, Term] = {
    "kl": KL(KLLoss(temperature=2.0, weight=0.5)),
    "logit_mse": LogitMSE(LogitMSELoss(weight=0.5)),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_same_loss_and_gradients_without_logits(name: str) -> None:
    term = TERMS[name]
    results = []
    for linear in (True, False):
        student, teacher = head(8, 0, trained=True), head(16, 1, trained=False)
        outputs = Signals(student if linear else student.logits())
        taught = Signals(teacher if linear else teacher.logits())
        rows = term(outputs, {"only": taught}, None, batch())
        losses = torch.where(batch().row_sets["all"], rows, 0.0)  # as the bundle counts them
        losses.sum().backward()
        if linear:
            assert outputs._logits is outputs.head and taught._logits is taught.head
        gradients = [student.features.grad, student.weight.grad, student.bias.grad]
        results.append((losses, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_logits_are_made_once_when_a_term_asks() -> None:
    signals = Signals(head(8, 0, trained=True))
    assert signals.logits is signals.logits
    assert signals.logits.shape == (ROWS, VOCABULARY)
