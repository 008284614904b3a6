"""A gradient that is not finite changes no weight, without a look at each gradient by itself."""

from __future__ import annotations

from typing import Any

import deepspeed.runtime.utils as utils
import deepspeed.runtime.zero.stage_1_and_2 as stages
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from engines import engine_of, make_batch, make_student, terms_of

from ds_distill.engine.world import World
from ds_distill.models.bundle import Bundle

HALVES = ["zero0_bf16", *(f"zero{stage}_{half}" for stage in (1, 2) for half in ("bf16", "fp16"))]


@pytest.mark.parametrize("bad", ["classifier.weight", "classifier.bias"])  # decayed, and not
@pytest.mark.parametrize(
    ("config", "value"), [*zip(HALVES, [float("inf"), float("nan")] * 3, strict=False)]
)
def test_a_step_is_skipped(
    world: World, config: str, value: float, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)

    def looks(*_: Any) -> None:
        raise AssertionError("each gradient is looked at")

    monkeypatch.setattr(utils, "has_inf_or_nan", looks)
    monkeypatch.setattr(stages, "has_inf_or_nan", looks)
    student = make_student(0.0)
    engine = engine_of(world, Bundle(student, {}, terms_of({"cross_entropy": {}})), config)
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
