"""Rows of which a teacher says nothing, whatever its numbers are there: each policy, each term that
reads what teachers predict, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tr
from cache_files import make_keys
from toys import make_tiny_bert, toy_vocabulary

from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.policies import POLICIES
from ds_distill.recipe.terms import losses_of
from ds_distill.routing import Router, fit
from ds_distill.routing.multi_label import fit_by_label
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

NAMES, CLASSES, ROWS = ("a", "b", "c"), 3, 5
TERMS: tuple[dict[str, Any], ...] = (
    {"cross_entropy": {}, "kl": {"temperature": 2.0}, "teacher_cross_entropy": {}},
    {"kl": {"divergence": "reverse_kl", "tolerance": 0.01}, "logit_mse": {}},
    {"kl": {"divergence": "js"}},
    {"kl": {"divergence": "tv"}},
)
SAYS = {
    "one is silent": "11111 10101 11111",
    "two are": "11111 10101 10001",
    "all are of two rows": "10101 10100 10001",
    "all are": "00000 00000 00000",
}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("silent")
    make_tiny_bert(folder, toy_vocabulary())
    model = tr.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=CLASSES)
    return model.eval()


@pytest.fixture(scope="module")
def fitted() -> dict[bool, Any]:
    """On some other rows; of one label each, and of any number."""
    words = {name: Signals(randn(60, CLASSES, seed=at)) for at, name in enumerate(NAMES)}
    truth, keys = np.arange(60) % CLASSES, torch.as_tensor(make_keys(60))
    labels = [*"xyz"]
    return {
        False: fit(words, truth, keys, labels),
        True: fit_by_label(words, np.eye(CLASSES, dtype=np.int64)[truth], keys, labels),
    }


def loss_of(
    model: Any, router: Router | None, terms: dict[str, Any], batch: Batch
) -> list[torch.Tensor]:
    """Loss, and the gradient of each of the student's weights."""
    model.zero_grad()
    bundle = Bundle(model, {}, build_terms(losses_of(terms), TermInputs()), router)
    loss = bundle.eval()(batch)["loss"]
    loss.backward()
    return [loss.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]


@pytest.mark.parametrize("many", [False, True], ids=["", "many labels"])
@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
@pytest.mark.parametrize("policy", [None, *sorted(POLICIES.keys() - {"chosen"})])
def test_what_a_silent_teacher_holds_moves_nothing(
    policy: str | None, says: str, many: bool, model: Any, fitted: dict[bool, Any]
) -> None:
    """NaN, -inf or any other number: the loss and its gradients are those of zeros, and those of
    the rows alone of which somebody says something."""
    names = NAMES if policy else NAMES[1:2]
    words = dict(zip(NAMES, says.split(), strict=True))
    reported = {name: torch.tensor([c == "1" for c in words[name]]) for name in names}
    ids = torch.randint(5, 60, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    keys = torch.as_tensor(make_keys(ROWS))
    labels = torch.tensor([0, 1, 2, -100, 1])
    if many:
        labels = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [-100] * 3, [1, 1, 1]])
    router = policy and Router(policy, temperature=2.0, fitted=fitted[many])

    def batch(rows: torch.Tensor, held: float) -> Batch:
        signals = {
            name: Signals(
                randn(ROWS, CLASSES, seed=9 + at).masked_fill(~reported[name][:, None], held)[rows],
                reported=reported[name][rows],
            )
            for at, name in enumerate(names)
        }
        view, named = PaddedView(ids[rows], torch.ones(len(rows), 6).long()), ["b", None, "c"]
        teachers = [named[row % 3] for row in rows.tolist()]
        views = {"student": view}
        made: dict[str, Any] = {"keys": keys[rows], "signals": signals, "teacher_names": teachers}
        return Batch.from_views(views, labels[rows], **made)

    every, taught = torch.arange(ROWS), torch.stack([*reported.values()]).any(dim=0)
    for terms in TERMS:
        found = loss_of(model, router, terms, batch(every, 0.0))
        assert all(part.isfinite().all() for part in found)
        for held in (torch.nan, -torch.inf, torch.inf, 1e38):
            again = loss_of(model, router, terms, batch(every, held))
            assert all(map(torch.equal, again, found)), (terms, held)
        if "cross_entropy" in terms:  # counts all rows with a label
            continue
        if not taught.any():
            assert not any(part.any() for part in found)
            continue
        alone = loss_of(model, router, terms, batch(taught.nonzero()[:, 0], 0.0))
        for part, wanted in zip(found, alone, strict=True):
            torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-6)
