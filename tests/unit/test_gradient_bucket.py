"""DeepSpeed's bucket of gradients takes no more memory than the gradients of a student do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_batch, make_student

from ds_distill.engine import engine as module
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.placement import fit_bucket
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training


@pytest.mark.parametrize("config", ["zero1_fp32", "zero1_bf16", "zero2_fp32", "zero3_fp32"])
def test_nothing_longer_than_all_gradients_is_allocated(
    world: World, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make_student(0.0)
    numel = sum(weight.numel() for weight in student.parameters())
    terms = build_terms(losses_of({"cross_entropy": {}}), TermInputs(8))
    training = Training(batch_size=4, micro_batch_size=4)
    settings = OptimizerSettings(0.01, 0.1, total_steps=10, warmup_steps=1)
    asked: list[int] = []
    empty = torch.empty

    def recorded(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        asked.append(made.numel())
        return made

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(module, "trains_alone", lambda *_: False)  # as on several ranks
    given = deepspeed_config(config, training, 1)
    engine = Engine(Bundle(student, {}, terms), given, world, settings)
    for _ in range(2):
        engine.train_step([make_batch()])
    engine.close()
    assert numel in asked and max(asked) <= numel + 16  # padded to equal shares


def test_a_bucket_of_the_configs_own_stays() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    own = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}}
    assert fit_bucket(own, weights) == own
    made = fit_bucket({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, weights)
    assert made["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 17}
    assert made["bf16"] == {"enabled": True}
    for stage in (0, 3):
        none = {"zero_optimization": {"stage": stage}}
        assert fit_bucket(none, []) == none
    assert fit_bucket({"zero_optimization": {"stage": 0}}, weights)["zero_optimization"] == {
        "stage": 0
    }
