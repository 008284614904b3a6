"""Memory of a step's terms on one head, counted in tensors, at a hundredth of all sizes and
budgets."""

import sys

import pytest
import torch
from passes import allocated_peak
from torch import nn

from ds_distill.losses import KL, Cosine, CrossEntropy, Seen
from ds_distill.losses import logits as logits_of
from ds_distill.models.bundle import Bundle
from ds_distill.types import Batch, Signals, VocabularyHead
from ds_kernels import _projections, _rows_reference

ROWS, LABELLED, VOCABULARY, KNOWN, WIDTH = 1400, 350, 6000, 3052, 77


def peak(terms, labelled):
    """Bytes of tensors that are alive at a time in the step of a bundle's terms."""
    torch.manual_seed(0)
    own, other = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, KNOWN).requires_grad_(False)
    states, wanted = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    every = torch.arange(ROWS)
    sets = {"all": every, "tokens": every, "labelled": every[:labelled]}
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    counts = {name: torch.tensor(len(rows)) for name, rows in sets.items()}
    batch = Batch(torch.zeros(ROWS, 2).long(), {}, labels, sets, counts=counts)
    student = Signals(VocabularyHead(states, own, own), {-1: states})
    teachers = {"t": Signals(VocabularyHead(wanted, other, other), {-1: wanted})}
    bundle = Bundle(None, {}, terms)
    seen = Seen(student, batch, teachers)
    return allocated_peak(lambda: bundle._loss(terms, seen)["loss"].backward())


@pytest.mark.parametrize(
    ("labelled", "kl_first"), [(LABELLED, False), (LABELLED, True), (14, False), (13, True)]
)
def test_labels_cost_little_beside_a_teachers_head(labelled, kl_first, monkeypatch):
    """In any order of a recipe's losses: there is one gradient of the head, and of the states none
    when the logits are made."""
    monkeypatch.setattr(logits_of, "LOGIT_BYTES", {"cpu": logits_of.LOGIT_BYTES["cpu"] // 100})
    for name in ("LOGIT_BYTES", "KEEP_BYTES"):
        budgets = getattr(_projections, name)
        monkeypatch.setattr(_projections, name, {"cpu": budgets["cpu"] // 100})
    for module in (_rows_reference, sys.modules["ds_kernels.masked_cosine"]):  # small as they are
        monkeypatch.setattr(module, "_REFERENCE_ELEMENTS", module._REFERENCE_ELEMENTS // 10)
    cross_entropy = {"cross_entropy": CrossEntropy()}
    kl = {"kl": KL({"rows": "tokens", "temperature": 2.0})}
    cosine = {"cosine": Cosine({"rows": "tokens"})}
    together = {**kl, **cross_entropy} if kl_first else {**cross_entropy, **kl}
    ratio = peak({**together, **cosine}, labelled) / peak(kl, labelled)
    # Less than the 1.2 of the benchmark: the reference's buffers are larger than a hundredth.
    assert ratio < 1.15, ratio
