"""What a pass is planned to cost, against the same pass on a CPU: operations exactly, memory within
15%."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flops import encoder_flops
from passes import CONFIGS, SIZE, allocated_peak, model_of, of, real, run
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from ds_distill.models.load import checkpoint_activations
from ds_distill.planning import cpu_speed as measured
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.models import (
    Pass,
    PlannedModel,
    cost,
    planned_model,
    shipped_configs,
)
from ds_distill.planning.roofline import pass_seconds, seconds
from ds_distill.planning.trace import Trace
from ds_distill.recipe import builtin_recipes, load_recipe
from ds_distill.views import PaddedView

SHAPES = [(8, 64), *(pytest.param(of, marks=pytest.mark.further) for of in ((4, 32), (3, 128)))]
FAST = 5e10
"""Operations a second."""


def measured_peak(model: Any, view: PaddedView, trains: bool) -> int:
    return allocated_peak(lambda: run(model, view, trains))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("trains", [True, False])
def test_operations_are_those_of_torchs_counter(name: str, trains: bool) -> None:
    planned, one = model_of(name), of(2, 48, trains)
    model, view = real(planned, one)
    with FlopCounterMode(display=False) as counter:
        run(model, view, trains)
    assert cost(planned, one).flops == counter.get_total_flops() > 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trains", [True, False])
def test_activations_are_within_15_percent(name: str, shape: tuple[int, int], trains: bool) -> None:
    """Six layers, of which the plan traced two and three."""
    planned, one = model_of(name), of(*shape, trains)
    peak = measured_peak(*real(planned, one), trains)
    assert cost(planned, one).peak == pytest.approx(peak, rel=0.15)


def test_activations_of_a_masked_lm() -> None:
    planned, one = model_of("bert", classes=None), of(8, 64, True, rows=77)
    peak = measured_peak(*real(planned, one), True)
    assert cost(planned, one).peak == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_that_are_computed_again(name: str) -> None:
    planned, one = model_of(name), of(8, 64, True, checkpointing=True)
    model, view = real(planned, one)
    checkpoint_activations(model)
    planned_cost = cost(planned, one)
    assert planned_cost.peak == pytest.approx(measured_peak(model, view, True), rel=0.15)
    stored = cost(planned, of(8, 64, True))
    assert planned_cost.peak < stored.peak / 2
    assert 1.2 < planned_cost.flops / stored.flops < 4 / 3 + 1e-9


def test_a_gpu_holds_less() -> None:
    """No map of scores, and dropout masks of a byte."""
    planned = model_of("bert")
    here = cost(planned, of(8, 256, True))
    there = cost(planned, of(8, 256, True, fused=True, mask_bytes=1))
    assert there.peak < 0.7 * here.peak
    assert there.flops >= here.flops  # the fused kernel's backward computes the scores again


def test_flashdeberta_makes_no_map_of_a_text() -> None:
    """DeBERTa's own attention has several in float32 at a time, one for each head."""
    planned, own = model_of("deberta"), of(8, 512, False, fused=True)
    heads = planned.config.num_attention_heads
    less = cost(planned, own).peak - cost(planned, replace(own, flashdeberta=True)).peak
    assert less > 3 * 4 * 8 * heads * 512 * 512


def test_tables_of_positions_stay_in_memory_on_a_gpu() -> None:
    planned, own = model_of("deberta"), of(1, 8, False, fused=True, flashdeberta=True)
    config = planned.config
    tables = config.num_hidden_layers * 2 * (2 * config.position_buckets * config.hidden_size)
    assert 4 * tables < cost(planned, own).peak < 1.3 * 4 * tables


def test_a_trace_counts_what_is_alive() -> None:
    with torch.device("meta"), Trace() as trace:
        first = torch.ones(1000)
        second = first * 2
        view = second[10:]
        del second
        third = view + first[10:]
        del first, view
        third.add_(1)
    assert trace.cost.peak == 4 * (1000 + 1000 + 990)
    assert trace.cost.flops == 0


PUBLISHED = {
    "google-bert/bert-base-uncased": 109.5,
    "google-bert/bert-large-uncased": 335.1,
    "FacebookAI/roberta-base": 124.6,
    "FacebookAI/roberta-large": 355.4,
    "microsoft/deberta-v3-base": 183.8,
    "microsoft/deberta-v3-large": 434.0,
    "distilbert/distilbert-base-uncased": 66.4,
    "albert/albert-base-v2": 11.7,
    "google/electra-small-discriminator": 13.5,
    "microsoft/MiniLM-L12-H384-uncased": 33.4,
    "huawei-noah/TinyBERT_General_4L_312D": 14.4,
    "FacebookAI/xlm-roberta-base": 278.0,
}
"""Millions of parameters, without heads; with poolers, which RoBERTa's classifier leaves out."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_configurations_have_the_published_sizes(name: str) -> None:
    folder = shipped_configs()[name]
    model = planned_model("model", str(folder), classes=2)
    parts = model.parts()
    body = parts["embeddings"] + parts["layers"]
    assert body / 1e6 == pytest.approx(PUBLISHED[name], rel=0.006)
    assert not model.shipped


def test_the_models_of_all_recipes_have_a_configuration() -> None:
    named = set()
    for recipe in map(load_recipe, builtin_recipes()):
        named |= {recipe.student.model, *recipe.encoders.values()}
    of_the_hub = {name for name in named if "/" in name and not name.startswith("pkg:")}
    assert of_the_hub <= set(shipped_configs())


def test_flops_are_those_of_the_closed_form() -> None:
    """An encoder's forward: L (8 H^2 + 4 H I) per token and 4 L H per pair of tokens; DeBERTa also
    projects its table of 512 distances twice in each layer."""
    for name in ("google-bert/bert-large-uncased", "microsoft/deberta-v3-large"):
        model = planned_model("model", str(shipped_configs()[name]), classes=2)
        planned = cost(model, of(4, 128, False, fused=True)).flops
        closed = encoder_flops(model.config, np.array([128] * 4))
        if "deberta" in name:
            closed += 24 * 2 * 2 * 512 * 1024**2
        assert planned == pytest.approx(closed, rel=0.001)  # the head's few rows


@pytest.mark.parametrize("trains", [True, False])
def test_a_cpu_runs_some_layers_and_a_part_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """The clock is replaced by a count of what runs: layers and examples, and the embeddings."""

    def counted(model: PlannedModel, depths: tuple[int, ...], one: Pass) -> list[float]:
        return [(10.0 + layers) * one.examples for layers in depths]

    monkeypatch.setattr(measured, "_seconds", counted)
    six, one = model_of("bert"), of(100, 16, trains)
    assert measured.measured_seconds(six, one, FAST) == pytest.approx((10 + 6) * 100)
    deep = replace(six, config=BertConfig(**{**SIZE, "num_hidden_layers": 24}))
    assert measured.measured_seconds(deep, replace(one, examples=7), FAST) == pytest.approx(34 * 7)
    masked = replace(six, classes=None)
    assert measured.measured_seconds(masked, replace(one, rows=240), FAST) == pytest.approx(1600)


def test_a_measured_pass_is_run() -> None:
    taken = measured.measured_seconds(model_of("deberta"), of(2, 16, True), FAST)
    assert taken is not None and taken > 0


def test_teachers_of_one_size_are_measured_once(caplog: pytest.LogCaptureFixture) -> None:
    first, one = replace(model_of("bert"), name="first"), of(3, 8, False)
    config = copy.deepcopy(first.config)
    config._name_or_path = "elsewhere"
    second = replace(first, name="second", reference="elsewhere", config=config)
    with caplog.at_level("INFO"):
        assert measured._seconds(first, (2,), one) is measured._seconds(second, (2,), one)
        measured._seconds(replace(second, classes=9), (2,), one)
    said = [line for line in caplog.messages if "3 x 8 tokens" in line]
    assert [line.split(" of ")[1].split()[0] for line in said] == ["first", "second"]


def test_what_a_cpu_would_take_long_to_run_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop without a GPU plans 24 layers: their passes took ten minutes without a word."""
    ran: list[Pass] = []

    def counted(model: PlannedModel, depths: tuple[int, ...], one: Pass) -> list[float]:
        ran.append(one)
        return [1.0 for _ in depths]

    monkeypatch.setattr(measured, "_seconds", counted)
    large = planned_model(
        "model", str(shipped_configs()["google-bert/bert-large-uncased"]), classes=2
    )
    assert measured.measured_seconds(large, of(32, 128, True), FAST) == 32 / 2
    assert [one.examples for one in ran] == [2]  # 97 GFLOP of five layers
    slow = replace(GPUS["l4"], name="cpu", half_flops=1e9, full_flops=1e9, per_machine=1)
    one = of(4, 128, True)
    assert pass_seconds(large, one, slow) == seconds(cost(large, one), slow, one.dtype)
    assert len(ran) == 1
