"""An engine of this process: its modes, its gradients and the memory that they take, and what is
left of it."""

import gc
import weakref

import deepspeed.runtime.utils as utils
import deepspeed.runtime.zero.stage_1_and_2 as stages
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from engines import engine_of, make_batch, make_engine, make_student, terms_of
from torch import nn

from ds_distill.engine import engine as module
from ds_distill.engine import internals
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import fit_bucket
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import freeze_embeddings

# ----------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_bf16", "zero3_fp32"])
def test_student_and_teachers_are_in_their_modes(world, config):
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


def two_models(world, config):
    bundle = Bundle(make_student(0.3), {"t": make_student(0.3)}, terms_of({"cross_entropy": {}}))
    return engine_of(world, bundle, config)


@pytest.mark.parametrize("config", ["zero0_fp32", "zero3_fp32"])
def test_a_prediction_visits_modules_where_their_mode_changes_alone(world, config, monkeypatch):
    """It takes half of the time of a prediction with one teacher beside three."""
    engine, train = two_models(world, config), Bundle.train
    calls = []

    def counted(bundle, mode=True):
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
def test_a_step_visits_no_module_but_to_run_it(world, config, monkeypatch):
    """DeepSpeed would go through all of the teachers' weights twice a step, a sixth of its time."""
    engine, walks, walk = two_models(world, config), 0, torch.nn.Module.named_modules
    engine.train_step([make_batch()])

    def counted(module, *arguments, **options):
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
def test_weights_are_saved_as_they_were_loaded_or_as_the_optimizer_has_them(
    world, config, monkeypatch
):
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
    trained = weights["classifier.weight"]
    assert not torch.equal(trained, before["classifier.weight"])
    # Of the optimizer, whose copy has all 24 bits.
    half = torch.float16 if config.endswith("fp16") else torch.bfloat16
    assert not torch.equal(trained, trained.to(half).float())


def test_what_deepspeed_keeps_of_a_model_goes_with_it_alone(monkeypatch):
    gone, other = (nn.Sequential(nn.Linear(1, 1)) for _ in range(2))
    stack = [other, gone[0], gone, other[0]]
    monkeypatch.setattr(internals, "FWD_MODULE_STACK", stack)
    internals.forget(gone)
    assert stack == [other, other[0]]


# ----------------------------------------------------------------------- the bucket of gradients


@pytest.mark.parametrize("config", ["zero1_fp32", "zero1_bf16", "zero2_fp32", "zero3_fp32"])
def test_nothing_longer_than_all_gradients_is_allocated(world, config, monkeypatch):
    student = make_student(0.0)
    numel = sum(weight.numel() for weight in student.parameters())
    asked = []
    empty = torch.empty

    def recorded(*size, **options):
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


def test_a_bucket_of_the_configs_own_stays():
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


# ----------------------------------------------------------------- gradients that are not finite


HALVES = ["zero0_bf16", *(f"zero{stage}_{half}" for stage in (1, 2) for half in ("bf16", "fp16"))]


@pytest.mark.parametrize("bad", ["classifier.weight", "classifier.bias"])  # decayed, and not
@pytest.mark.parametrize(
    ("config", "value"), [*zip(HALVES, [float("inf"), float("nan")] * 3, strict=False)]
)
def test_a_step_is_skipped(world, config, value, bad, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)

    def looks(*_):
        raise AssertionError("each gradient is looked at")

    monkeypatch.setattr(utils, "has_inf_or_nan", looks)
    monkeypatch.setattr(stages, "has_inf_or_nan", looks)
    student = make_student(0.0)
    engine = engine_of(world, Bundle(student, {}, terms_of({"cross_entropy": {}})), config)
    poisoned = [False]

    def poison(gradient):
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


# ---------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize(
    ("config", "checkpointing"),
    [
        (f"zero{n}_{dtype}", n % 2 == (dtype == "bf16"))
        for n in range(4)
        for dtype in ("fp32", "bf16")
    ],
)
def test_nothing_of_it_is_left(world, config, checkpointing):
    """Weights, gradients and optimizer. At stage 3 a list and a cache of DeepSpeed's would keep the
    model, and what hangs on it, for ever."""
    engine = make_engine(world, config, checkpointing=checkpointing)
    for _ in range(3):
        engine.train_step([make_batch()])
    engine.predict(make_batch(), ["student"])
    left = [weakref.ref(engine.bundle), *map(weakref.ref, engine.bundle.student.parameters())]
    left += [weakref.ref(engine._engine), weakref.ref(engine._engine.optimizer)]
    engine.close()
    del engine
    gc.collect()
    assert [one() for one in left if one() is not None] == []


def test_nothing_is_left_of_sharded_models_that_only_ran(world):
    trained = make_engine(world, "zero3_fp32")
    model = trained.bundle.student
    trained.close()
    engine = Engine(
        Bundle(None, {"student": model}), deepspeed_config("zero3_fp32", None, 1), world
    )
    for _ in range(3):
        engine.predict(make_batch(), ["student"])
    left = [weakref.ref(engine.bundle), weakref.ref(model)]
    engine.close()
    del engine, model, trained
    gc.collect()
    assert [one() for one in left if one() is not None] == []
