"""A student trains with dropout from the first step on, and again after it was validated; teachers
never do. What a step leaves out, and which weights it does not train, stays out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from engines import engine_of, make_batch, make_student, terms_of

from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import freeze_embeddings


@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_bf16", "zero3_fp32"])
def test_student_and_teachers_are_in_their_modes(world: World, config: str) -> None:
    student, teacher = make_student(0.3).eval(), make_student(0.3).eval()  # as transformers loads
    bundle = Bundle(student, {"teacher": teacher}, terms_of({"cross_entropy": {}}))
    engine = engine_of(world, bundle, config)
    for _ in range(2):
        engine.train_step([make_batch()])
        assert all(module.training for module in student.modules())
        assert not any(module.training for module in teacher.modules())
        engine.predict(make_batch(), ["student"])
        assert not any(module.training for module in student.modules())
    engine.close()


def two_models(world: World, config: str) -> Engine:
    bundle = Bundle(make_student(0.3), {"t": make_student(0.3)}, terms_of({"cross_entropy": {}}))
    return engine_of(world, bundle, config)


@pytest.mark.parametrize("config", ["zero0_fp32", "zero3_fp32"])
def test_a_prediction_visits_modules_where_their_mode_changes_alone(
    world: World, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes half of the time of a prediction with one teacher beside three."""
    engine, train = two_models(world, config), Bundle.train
    calls: list[bool] = []

    def counted(bundle: Bundle, mode: bool = True) -> Bundle:
        calls.append(mode)
        return train(bundle, mode)

    monkeypatch.setattr(Bundle, "train", counted)
    for _ in range(2):
        engine.train_step([make_batch()])
        for _ in range(3):
            engine.predict(make_batch(), ["student"])
    assert calls == [False, True, False]
    engine.close()


@pytest.mark.parametrize("config", ["zero0_fp32", "zero0_bf16", "zero1_fp32"])
def test_a_step_visits_no_module_but_to_run_it(
    world: World, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed would go through all of the teachers' weights twice a step, a sixth of its time."""
    engine, walks, walk = two_models(world, config), 0, torch.nn.Module.named_modules
    engine.train_step([make_batch()])

    def counted(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        nonlocal walks
        walks += module is engine.bundle
        return walk(module, *arguments, **options)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    for _ in range(3):
        engine.train_step([make_batch()])
    assert walks == 0
    engine.close()


@pytest.mark.parametrize(
    "config",
    ["zero0_bf16", "zero1_bf16", "zero3_bf16", "zero1_fp16", "zero3_fp16", "zero0_fp32"],
)
def test_frozen_weights_are_saved_as_they_were_loaded(
    world: World, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 has no more than 8 bits of each, fp16 11."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    student = make_student(0.3)
    freeze_embeddings(student)
    before = {name: value.clone() for name, value in student.named_parameters()}
    engine = engine_of(world, Bundle(student, {}, terms_of({"cross_entropy": {}})), config)
    for _ in range(2):
        engine.train_step([make_batch()])
    weights = engine.student_weights()
    engine.close()
    frozen = {name for name in before if ".embeddings." in name}
    assert len(frozen) == 5
    assert all(torch.equal(weights[name], before[name]) for name in frozen)
    assert not torch.equal(weights["classifier.weight"], before["classifier.weight"])
