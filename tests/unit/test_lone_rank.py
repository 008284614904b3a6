"""A lone rank has an optimizer of its own below stage 3, and trains as DeepSpeed would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import make_batch, make_engine
from torch import nn

from ds_distill.engine import engine as module
from ds_distill.engine.config import trains_alone
from ds_distill.engine.engine import Engine
from ds_distill.engine.flat_adamw import FlatAdamW
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.recipe.terms import losses_of

LIMITS = {"fp32": 2e-6, "bf16": 2e-3}
"""Of weights that a step moves by .01: the norm of gradients is added up in another order, and in
bf16 an activation may be rounded to the other side."""
CONFIGS = [f"zero{stage}_{precision}" for stage in range(3) for precision in ("fp32", "bf16")]


def engine_of(world: World, config: str, micro_steps: int = 1) -> tuple[Engine, nn.Parameter]:
    """With a weight that no loss reads, which weight decay shrinks."""
    terms = build_terms(losses_of({"cross_entropy": {}}), TermInputs(8))
    terms["cross_entropy"].unread = unread = nn.Parameter(torch.ones(4, 4))
    return make_engine(world, config, terms, dropout=0.0, micro_steps=micro_steps), unread


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_step_is_deepspeeds(
    world: World, config: str, micro_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, losses = [], []
    for alone in (True, False):
        if not alone:
            monkeypatch.setattr(module, "trains_alone", lambda *_: False)
        engine, unread = engine_of(world, config, micro_steps)
        assert isinstance(engine._engine.optimizer, FlatAdamW) == alone
        steps = [engine.train_step([make_batch()] * micro_steps) for _ in range(4)]
        losses.append([float(step["loss"]) for step in steps])
        assert float(unread.detach().max()) < 1.0
        found.append({**engine.student_weights(), "unread": unread.detach().float()})
        engine.close()
        head = found[-1]["classifier.weight"]
        assert (head != head.bfloat16().float()).any(), "published as it computes, rounded"
    assert losses[0] == pytest.approx(losses[1], rel=LIMITS[config[-4:]])
    limit = LIMITS[config[-4:]]
    for name, weight in found[1].items():
        assert (weight - found[0][name]).abs().max() <= limit, name


@pytest.mark.parametrize("before", CONFIGS[:2])
@pytest.mark.parametrize("alone", [True, False])
def test_a_checkpoint_of_either_is_the_others(
    world: World, before: str, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run on one rank that goes on upon several, or the other way round."""
    monkeypatch.setattr(module, "trains_alone", lambda *_: alone)
    engine, _ = engine_of(world, before)
    for _ in range(2):
        engine.train_step([make_batch()])
    engine.save(tmp_path)
    expected = float(engine.train_step([make_batch()])["loss"]), engine.student_weights()
    engine.close()
    monkeypatch.setattr(module, "trains_alone", lambda *_: not alone)
    engine, _ = engine_of(world, before.replace("zero0", "zero1"))
    engine.load(tmp_path)
    loss, weights = float(engine.train_step([make_batch()])["loss"]), engine.student_weights()
    engine.close()
    limit = LIMITS[before[-4:]]
    assert loss == pytest.approx(expected[0], rel=limit)
    for name, weight in expected[1].items():
        assert (weight - weights[name]).abs().max() <= limit, name


@pytest.mark.parametrize(
    ("stage", "more", "ranks", "alone"),
    [
        (0, {}, 1, True),
        (2, {}, 1, True),
        (3, {}, 1, False),
        (1, {}, 2, False),
        (1, {"fp16": {"enabled": True}}, 1, False),
        (2, {"offload": True}, 1, False),
    ],
)
def test_who_trains_alone(stage: int, more: dict[str, object], ranks: int, alone: bool) -> None:
    zero: dict[str, object] = {"stage": stage}
    if more.pop("offload", False):
        zero["offload_optimizer"] = {"device": "cpu"}
    assert trains_alone({"zero_optimization": zero, **more}, ranks) == alone


def test_a_weight_without_a_gradient_has_one_of_0() -> None:
    """Not the one of the step before."""
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    adamw, plain = (torch.optim.AdamW(of, lr=0.1) for of in (weights, copies))
    flat = FlatAdamW(adamw, [weights], 0.0, looks=False)
    for has in ((True, True), (True, False), (False, True)):
        for weight, copy, given in zip(weights, copies, has, strict=True):
            weight.grad = torch.full_like(weight, 2.0) if given else None
            copy.grad = torch.full_like(copy, 2.0 * given)
        flat.step()
        flat.zero_grad()
        plain.step()
    for weight, copy in zip(weights, copies, strict=True):
        torch.testing.assert_close(weight, copy)
