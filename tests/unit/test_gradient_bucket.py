"""DeepSpeed's bucket of gradients takes no more memory than the gradients of a student do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import engine_of, make_batch, make_student, terms_of

from ds_distill.engine import engine as module
from ds_distill.engine.placement import fit_bucket
from ds_distill.engine.world import World
from ds_distill.models.bundle import Bundle


@pytest.mark.parametrize("config", ["zero1_fp32", "zero1_bf16", "zero2_fp32", "zero3_fp32"])
def test_nothing_longer_than_all_gradients_is_allocated(
    world: World, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make_student(0.0)
    numel = sum(weight.numel() for weight in student.parameters())
    asked: list[int] = []
    empty = torch.empty

    def recorded(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        asked.append(made.numel())
        return made

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(module, "trains_alone", lambda *_: False)  # as on several ranks
    engine = engine_of(world, Bundle(student, {}, terms_of({"cross_entropy": {}})), config)
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
