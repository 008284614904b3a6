"""A gradient that is not finite changes no weight, without a look at each gradient by itself."""

from __future__ import annotations

from typing import Any

import deepspeed.runtime.utils as utils
import deepspeed.runtime.zero.stage_1_and_2 as stages
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from engines import make_batch, make_student

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training

HALVES = ["zero0_bf16", *(f"zero{stage}_{half}" for stage in (1, 2) for half in ("bf16", "fp16"))]


@pytest.mark.parametrize("bad", ["classifier.weight", "classifier.bias"])  # decayed, and not
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("config", HALVES)
def test_a_step_is_skipped(
    world: World, config: str, value: float, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)

    def looks(*_: Any) -> None:
        raise AssertionError("each gradient is looked at")

    monkeypatch.setattr(utils, "has_inf_or_nan", looks)
    monkeypatch.setattr(stages, "has_inf_or_nan", looks)
    student = make_student(0.0)
    terms = build_terms(losses_of({"cross_entropy": {}}), TermInputs(8))
    training = Training(batch_size=4, micro_batch_size=4)
    settings = OptimizerSettings(0.01, 0.1, total_steps=10, warmup_steps=1)
    engine = Engine(
        Bundle(student, {}, terms), deepspeed_config(config, training, 1), world, settings
    )
    poisoned = [False]

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, value) if poisoned[0] else gradient

    dict(student.named_parameters())[bad].register_hook(poison)
    engine.train_step([make_batch()])
    assert not engine.was_step_skipped
    before = {name: weight.clone() for name, weight in engine.student_weights().items()}
    poisoned[0] = True
    engine.train_step([make_batch()])
    assert engine.was_step_skipped
    after = engine.student_weights()
    assert all(torch.equal(after[name], before[name]) for name in before)
    poisoned[0] = False
    engine.train_step([make_batch()])
    assert not engine.was_step_skipped
    assert not torch.equal(engine.student_weights()[bad], before[bad])
    engine.close()
