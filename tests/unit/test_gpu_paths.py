"""What runs otherwise on a GPU, as far as a CPU can show it."""

import os
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from engines import engine_of, make_batch, make_student, terms_of
from waits import Waits

from ds_distill.engine import world as worlds
from ds_distill.engine.predict import _of_all_ranks
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.losses import TermInputs
from ds_distill.models.bundle import Bundle
from ds_distill.models.packed import ATTENTION
from ds_distill.models.reference import ModelReference
from ds_distill.routing import Router
from ds_distill.run.run import Run

META = torch.device("meta")
"""Stands for a GPU."""


@pytest.mark.parametrize("term", ["cosine", "attention_mse"])
def test_at_stage_3_the_student_runs_where_its_weights_are(term, world, monkeypatch):
    """Which weights a term reads is found by a pass, before DeepSpeed moves them."""
    moved = []
    to = torch.Tensor.to

    def to_device(tensor, *given, **named):
        if given[:1] != (META,):
            return to(tensor, *given, **named)
        moved.append(tensor)
        return tensor

    class Reached(Exception):
        """DeepSpeed's engine would be built now."""

    def initialize(**options):
        raise Reached

    monkeypatch.setattr(torch.Tensor, "to", to_device)
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    inputs = TermInputs(8, {"t": 8}, 1, {"t": 1})
    bundle = Bundle(make_student(0.0), {}, terms_of({term: {}}, inputs))
    with pytest.raises(Reached):
        engine_of(replace(world, device=META), bundle, "zero3_fp32")
    assert not moved, "buffers of a student that has run on the CPU"


def test_a_lone_rank_keeps_what_it_has_predicted_where_it_is(world):
    """A whole split would be on the device, beside all models."""
    part = torch.arange(6.0).view(2, 3)
    runner = SimpleNamespace(world=replace(world, device=META))
    assert _of_all_ranks(runner, part) is part


class Accelerator:
    """A host's GPUs as a rank sees them."""

    def __init__(self, visible):
        self.visible = visible

    def device_name(self, number=None):
        return "cuda" if number is None else f"cuda:{number}"

    def device_count(self):
        return self.visible

    def set_device(self, number):
        raise StopIteration(number)


@pytest.mark.parametrize(("visible", "number"), [(1, 0), (4, 3), (8, 3)])
def test_a_rank_that_sees_its_own_gpu_alone_takes_it(visible, number, monkeypatch):
    """As `srun --gpus-per-task=1` starts it. DeepSpeed reads the number in LOCAL_RANK."""
    monkeypatch.setattr(worlds, "get_accelerator", lambda: Accelerator(visible))
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StopIteration) as taken:
        World.start()
    assert taken.value.value == number and os.environ["LOCAL_RANK"] == str(number)


def test_a_rank_without_a_gpu_is_told(monkeypatch):
    monkeypatch.setattr(worlds, "get_accelerator", lambda: Accelerator(2))
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "4,5"}.items():
        monkeypatch.setenv(name, value)
    told = r"rank 3 of this host has no GPU: 2 are visible.*=4,5\).*Start no more"
    with pytest.raises(UserError, match=told):
        World.start()


def test_padding_never_is_refused_where_a_gpu_cannot(tiny_models, monkeypatch):
    """It was padded all the same, without a word; `check` may run where no GPU is."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    world = SimpleNamespace(device=torch.device("cuda"))
    run = SimpleNamespace(recipe=SimpleNamespace(padding="never"), world=world)
    teacher = ModelReference("first", str(tiny_models["bert"]))
    with pytest.raises(UserError, match=r"padding=never: first \(bert\) cannot run without padd"):
        Run.packed(run, teacher, half=True)
    assert Run.packed(run, teacher, half=False) == "example by example"
    run.recipe.padding = None
    assert Run.packed(run, teacher, half=True) is None


@pytest.mark.parametrize(
    ("family", "device", "attention"),
    [("bert", "cuda", ATTENTION), ("bert", "cpu", "eager"), ("deberta", "cuda", None)],
)
def test_what_a_model_on_a_gpu_is_loaded_with_waits_for_no_device(
    tiny_models, family, device, attention
):
    """transformers' own looks at the mask in each pass; see test_packed.py."""
    run = SimpleNamespace(
        recipe=SimpleNamespace(seed=0),
        world=SimpleNamespace(device=torch.device(device)),
        labels=["a", "b"],
        task_name="task",
        data=None,
        kind=SimpleNamespace(load=lambda data, model, labels, **options: options),
    )
    student = ModelReference("student", str(tiny_models[family]))
    loaded = Run.model(run, student, new_head=True)
    assert loaded["attention"] == attention


def test_teachers_routing_and_losses_wait_for_no_device(world):
    """Between two looks of DeepSpeed's at the gradients, Python stays ahead of the GPU. From the
    second step on: what terms and policies look up is there by then."""
    models = [make_student(0.1) for _ in range(3)]
    for model in models:
        model.set_attn_implementation(ATTENTION)
    losses = {
        "kl": {"temperature": 2.0},
        "cross_entropy": {"class_weights": {"a": 2.0}},
        "confidence_penalty": {"weight": 0.1},
        **{name: {} for name in ("logit_mse", "hidden_mse", "teacher_cross_entropy")},
    }
    teachers = dict(zip(("t", "u"), models[1:], strict=True))
    widths, depths = dict.fromkeys(teachers, 8), dict.fromkeys(teachers, 1)
    terms = terms_of(losses, TermInputs(8, widths, 1, depths, ["a", "b", "c"], [2, 1, 1]))
    batch = make_batch()
    views = dict.fromkeys(("student", *teachers), batch.views["student"])
    batch = replace(batch, views=views, row_sets={**batch.row_sets, "all": torch.arange(4)})
    bundle = Bundle(models[0], dict(teachers), terms, Router("average"))
    engine = engine_of(world, bundle, "zero1_fp32")
    forward, found = engine.bundle.forward, list[list[str]]()

    def watched(*given, **named):
        with Waits() as waits:
            result = forward(*given, **named)
        found.append(waits.found)
        return result

    engine.bundle.forward = watched
    for _ in range(3):
        engine.train_step([batch])
    engine.close()
    assert found[1:] == [[], []]
