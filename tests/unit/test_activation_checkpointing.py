"""Activations that are computed again: the same training, as the recipe asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training
from ds_distill.types import Batch
from ds_distill.views import PaddedView

SIZE: dict[str, Any] = {"num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 50}


@pytest.fixture(autouse=True)
def _one_world() -> Iterator[None]:
    yield
    World.stop()


def train(stage: int, *, checkpointing: bool) -> tuple[list[float], int]:
    """Losses of four steps with dropout and a live teacher, and how often a layer of the student
    ran forward."""
    world = World.start()
    training = Training(batch_size=4, activation_checkpointing=checkpointing)
    config = deepspeed_config(f"zero{stage}_fp32", training, world.size)
    config["zero_optimization"]["reduce_bucket_size"] = 10_000
    torch.manual_seed(0)
    student, teacher = (
        BertForSequenceClassification(
            BertConfig(hidden_size=width, intermediate_size=2 * width, num_labels=3, **SIZE)
        )
        for width in (16, 32)
    )
    terms = build_terms(losses_of({"kl": {}, "hidden_mse": {}}), TermInputs(16, {"big": 32}))
    bundle = Bundle(student, {"big": teacher}, terms)
    calls: list[bool] = []
    student.bert.encoder.layer[1].attention.register_forward_hook(
        lambda *_: calls.append(torch.is_grad_enabled())
    )
    engine = Engine(bundle, config, world, OptimizerSettings(1e-2, 0.0, 10, 1))
    calls.clear()  # of the pass that finds what terms of states read
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        ids = torch.randint(1, 50, (4, 6))
        views = dict.fromkeys(("student", "big"), PaddedView(ids, torch.ones_like(ids)))
        losses.append(float(engine.train_step([Batch.from_views(views)])["loss"]))
    engine.close()
    return losses, len(calls)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_is_the_same(stage: int) -> None:
    plain, once = train(stage, checkpointing=False)
    again, twice = train(stage, checkpointing=True)
    assert again == pytest.approx(plain, rel=1e-6)
    assert plain[-1] < plain[0]
    assert (once, twice) == (4, 8)
