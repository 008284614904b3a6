"""A lone rank at stage 0 reduces no gradients, and trains as DeepSpeed would with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_batch, make_engine
from torch import nn

from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.recipe.terms import losses_of


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_step_is_that_with_an_all_reduce(
    world: World, precision: str, micro_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a weight that no loss reads, which weight decay shrinks."""
    found = []
    for reduces in (True, False):
        terms = build_terms(losses_of({"cross_entropy": {}}), TermInputs(8))
        unread = nn.Parameter(torch.ones(4, 4))
        terms["cross_entropy"].unread = unread
        config = f"zero0_{precision}"
        engine = make_engine(world, config, terms, dropout=0.0, micro_steps=micro_steps)
        reduced = count_reductions(engine, monkeypatch)
        if reduces:
            engine._engine.enable_backward_allreduce = True
            monkeypatch.setattr(engine, "_fill_gradients", lambda: None)
        for _ in range(4):
            engine.train_step([make_batch()] * micro_steps)
        assert len(reduced) == (4 if reduces else 0)
        assert float(unread.detach().max()) < 1.0
        found.append({**engine.student_weights(), "unread": unread.detach().clone()})
        engine.close()
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name]), name


def count_reductions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each time that DeepSpeed reduces all gradients."""
    inner, calls = engine._engine, []
    original = inner.buffered_allreduce_fallback

    def counted(**options: Any) -> None:
        calls.append(None)
        original(**options)

    monkeypatch.setattr(inner, "buffered_allreduce_fallback", counted)
    return calls
