"""Trainings in fp16 under DeepSpeed's loss scale. A CPU without fp16 computes it in software, where
DeepSpeed has to be told that it may."""

import copy
import json

import pytest
import torch
from runs import after_calls, digests, interrupted, loaded, logged, results
from safetensors.torch import load_file

from ds_distill import run_recipe
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.engine.engine import Engine
from ds_distill.errors import UserError
from ds_distill.models.load import CLASSIFIER, load_model

STEPS = 24


@pytest.fixture
def computes_fp16(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


@pytest.fixture
def run(toy_settings, in_this_process, tmp_path):
    """Distils the toy task's student from two live teachers that learn first, and evaluates it; or
    only distils, from `teachers`."""

    def made(name, deepspeed, *, resume=False, teach=4, teachers=None):
        settings = copy.deepcopy(toy_settings)
        distil = {"teachers": "live", "losses": {"kl": {}, "cross_entropy": {}}, "steps": STEPS}
        if isinstance(deepspeed, dict):
            (tmp_path / f"{name}.json").write_text(json.dumps(deepspeed))
            deepspeed = str(tmp_path / f"{name}.json")
        tune = {"models": ["first", "second"], "steps": teach}
        phases = [{"fine-tune": tune}, {"distil": distil}, {"evaluate": {"split": "test"}}]
        if teachers is not None:
            settings["teachers"], phases = teachers, phases[1:2]
        settings["training"]["save_every"] = 2
        settings |= {"phases": phases, "logging": {"every": 1}, "deepspeed": deepspeed}
        run_recipe(loaded(settings, tmp_path), tmp_path / name, resume=resume)
        return tmp_path / name

    return made


def fp16(stage, **settings):
    return {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True, **settings}}


def steps_of(folder):
    """The events of the distil phase's steps."""
    return logged(folder, "train", "student")


def test_skipped_steps_and_the_loss_scale_survive_an_interruption(run, computes_fp16):
    """In the middle of the steps that are skipped."""
    config = fp16(2, initial_scale_power=22)
    whole = run("whole", config)
    [record] = results(whole)["phases"][1]["trained"]
    skipped = steps_of(whole)[-1]["skipped"]
    assert 2 < skipped < STEPS - 4 and record["skipped"] == skipped
    assert record["steps"] == STEPS
    rates = [one["learning_rate"] for one in steps_of(whole)]
    assert max(rates) == 1e-2 and rates[-1] == 0.0 and steps_of(whole)[-1]["schedule"]
    distils = after_calls(2, lambda engine, *_: engine.bundle.teachers)
    with interrupted(Engine, "train_step", distils):
        run("stopped", config)
    resumed = run("stopped", config, resume=True)
    assert digests(resumed) == digests(whole)
    keys = ("step", "loss", "loss_scale", "skipped", "learning_rate")
    first, second = (
        [[one[key] for key in keys] for one in steps_of(each)] for each in (resumed, whole)
    )
    assert first == second


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"initial_scale_power": 40, "min_loss_scale": 2**36}, "loss scale of 6.87195e"),
        ({"loss_scale": 1e30}, "50 steps one after the other"),
    ],
)
def test_a_training_that_only_skips_ends_with_advice(run, computes_fp16, settings, said):
    with pytest.raises(UserError, match=r"not finite in \d+ steps.*bf16 or fp32") as refused:
        run("skips", fp16(1, **settings), teach=60)
    assert said in str(refused.value)


def test_a_teacher_too_large_for_fp16_is_named(run, computes_fp16, toy_settings, tmp_path):
    """Beside one that is not, whose student is trained in fp16 and shipped in fp32."""
    model = toy_settings["student"]["model"]
    teacher = load_model(CLASSIFIER, model, ["animal", "food", "weather"], new_head=True)
    for name, factor in (("usual", 1.0), ("large", 1e7)):
        with torch.no_grad():
            teacher.classifier.weight.mul_(factor)
        teacher.save_pretrained(tmp_path / name)
        load_tokenizer(model).save_pretrained(tmp_path / name)
    usual, large = ({name: {"model": str(tmp_path / name)}} for name in ("usual", "large"))
    half = run("half", "zero3_fp16", teachers=usual)
    assert {(one["loss_scale"], one["skipped"]) for one in steps_of(half)} == {(2.0**16, 0)}
    shipped = load_file(half / "student" / "model.safetensors")
    assert {weight.dtype for weight in shipped.values()} == {torch.float32}
    full = steps_of(run("fits", "zero1_fp32", teachers=large))
    assert full and not any("loss_scale" in one for one in full)
    with pytest.raises(UserError, match=r"teachers.large: .*In fp16 .*65,504.*bf16 or fp32"):
        run("too-large", "zero1_fp16", teachers=large)


def test_a_device_without_fp16_and_stage_0_are_refused(run):
    from deepspeed.accelerator import get_accelerator

    with pytest.raises(UserError, match=r"at stage 0.*deepspeed=zero1_fp16"):
        run("stage-0", fp16(0))
    if get_accelerator().is_fp16_supported():
        pytest.skip("this CPU computes in fp16")
    with pytest.raises(UserError, match=r"zero1_fp16.json computes in fp16.*bf16 or fp32"):
        run("refused", "zero1_fp16")
