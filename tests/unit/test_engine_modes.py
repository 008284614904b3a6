"""A student trains with dropout from the first step on, and again after it was validated; teachers
never do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import make_batch, make_student

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.parts.phases import Training
from ds_distill.parts.terms import losses_of


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield World.start()
    World.stop()


@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_bf16", "zero3_fp32"])
def test_student_and_teachers_are_in_their_modes(world: World, config: str) -> None:
    student, teacher = make_student(0.3).eval(), make_student(0.3).eval()  # as transformers loads
    terms = build_terms(losses_of({"cross_entropy": {}}), TermInputs(8))
    training = Training(batch_size=4, micro_batch_size=4)
    engine = Engine(
        Bundle(student, {"teacher": teacher}, terms),
        deepspeed_config(config, training, 1),
        world,
        OptimizerSettings(0.01, 0.1, total_steps=10, warmup_steps=2),
    )
    for _ in range(2):
        engine.train_step([make_batch()])
        assert all(module.training for module in student.modules())
        assert not any(module.training for module in teacher.modules())
        engine.predict(make_batch(), ["student"])
        assert not any(module.training for module in student.modules())
    engine.close()
