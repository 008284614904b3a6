"""What a pass is planned to cost, against the same pass on a CPU: operations exactly, memory within
15%."""

from dataclasses import replace

import pytest
import torch
from passes import CONFIGS, allocated_peak, model_of, of, planned, real, run
from torch.utils.flop_counter import FlopCounterMode

from ds_distill.models.load import checkpoint_activations
from ds_distill.planning.models import cost, shipped_configs
from ds_distill.planning.trace import Trace
from ds_distill.recipe import builtin_recipes, load_recipe


def measured_peak(model, view, trains):
    return allocated_peak(lambda: run(model, view, trains))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("trains", [True, False])
def test_operations_are_those_of_torchs_counter(name, trains):
    planned, one = model_of(name), of(2, 48, trains)
    model, view = real(planned, one)
    run(model, view, trains)  # the first pass looks how it can run
    with FlopCounterMode(display=False) as counter:
        run(model, view, trains)
    assert cost(planned, one).flops == counter.get_total_flops() > 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("trains", [True, False])
def test_activations_are_within_15_percent(name, trains):
    """Six layers, of which the plan traced two and three."""
    planned, one = model_of(name), of(8, 64, trains)
    peak = measured_peak(*real(planned, one), trains)
    assert cost(planned, one).peak == pytest.approx(peak, rel=0.15)


def test_activations_of_a_masked_lm():
    planned, one = model_of("bert", classes=None), of(8, 64, True, rows=77)
    peak = measured_peak(*real(planned, one), True)
    assert cost(planned, one).peak == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_that_are_computed_again(name):
    planned, one = model_of(name), of(8, 64, True, checkpointing=True)
    model, view = real(planned, one)
    checkpoint_activations(model)
    planned_cost = cost(planned, one)
    assert planned_cost.peak == pytest.approx(measured_peak(model, view, True), rel=0.15)
    stored = cost(planned, of(8, 64, True))
    assert planned_cost.peak < stored.peak / 2
    assert 1.2 < planned_cost.flops / stored.flops < 4 / 3 + 1e-9


def test_a_gpu_holds_less():
    """No map of scores, and dropout masks of a byte."""
    planned = model_of("bert")
    here = cost(planned, of(8, 256, True))
    there = cost(planned, of(8, 256, True, fused=True, on_gpu=True))
    assert there.peak < 0.7 * here.peak
    assert there.flops >= here.flops  # the fused kernel's backward computes the scores again


def test_flashdeberta_makes_no_map_of_a_text():
    """DeBERTa's own attention has several in float32 at a time, one for each head."""
    planned, own = model_of("deberta"), of(8, 512, False, fused=True)
    heads = planned.config.num_attention_heads
    less = cost(planned, own).peak - cost(planned, replace(own, flashdeberta=True)).peak
    assert less > 3 * 4 * 8 * heads * 512 * 512


def test_a_trace_counts_what_is_alive():
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
    "FacebookAI/roberta-base": 124.6,
    "microsoft/deberta-v3-base": 183.8,
    "distilbert/distilbert-base-uncased": 66.4,
    "albert/albert-base-v2": 11.7,
    "google/electra-small-discriminator": 13.5,
    "microsoft/MiniLM-L12-H384-uncased": 33.4,
    "FacebookAI/xlm-roberta-base": 278.0,
}
"""Millions of parameters, without heads; with poolers, which RoBERTa's classifier leaves out."""


def test_shipped_configurations_have_the_published_sizes():
    for name, millions in PUBLISHED.items():
        model = planned(shipped_configs()[name], 2)
        parts = model.parts()
        body = parts["embeddings"] + parts["layers"]
        assert body / 1e6 == pytest.approx(millions, rel=0.006), name


def test_the_models_of_all_recipes_have_a_configuration():
    named = set()
    for recipe in map(load_recipe, builtin_recipes()):
        named |= {recipe.student.model, *recipe.encoders.values()}
    of_the_hub = {name for name in named if "/" in name and not name.startswith("pkg:")}
    assert of_the_hub <= set(shipped_configs())
