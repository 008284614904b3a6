"""Terms with `from` and `until`: which of them run, what they need, and how a recipe says it."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
import yaml
from families import built
from transformers import AutoModelForSequenceClassification

from ds_distill.check.phases import phase_mistakes
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.process.timers import Timers
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.terms import TERMS, losses_of
from ds_distill.training.meter import WARM_UP_STEPS, Meter
from ds_distill.types import Batch
from ds_distill.views import PaddedView

SWITCH = {
    "hidden_mse": {"until": 0.5},
    "cross_entropy": {"from": 0.5},
    "kl": {"from": 0.25, "until": 0.5},
}


def model(seed, width=8):
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2}
    return built("bert", AutoModelForSequenceClassification, seed=seed, num_labels=3, **sizes)


def bundle(losses):
    terms = build_terms(losses_of(losses), TermInputs(8, {"big": 16}))
    return Bundle(model(0), {"big": model(1, 16)}, terms).eval()


def batch(progress, **given):
    ids = torch.arange(1, 13).view(4, 3)
    views = dict.fromkeys(("student", "big"), PaddedView(ids, torch.ones_like(ids)))
    return Batch.from_views(views, torch.tensor([0, 2, 1, 1]), progress=progress, **given)


@pytest.mark.parametrize(
    ("progress", "active", "runs"),
    [
        (0.0, {"hidden_mse"}, 1),
        (0.2499, {"hidden_mse"}, 1),
        (0.25, {"hidden_mse", "kl"}, 1),
        (0.5, {"cross_entropy"}, 0),
        (0.999, {"cross_entropy"}, 0),
    ],
)
def test_active_terms_alone_make_the_loss(progress, active, runs):
    """With the values that they have on their own; teachers run where one of them reads them."""
    made = bundle(SWITCH)
    calls = []
    made.teachers["big"].register_forward_hook(lambda *call: calls.append(call))
    parts = made(batch(progress))
    assert set(parts) == {"loss", *active} and len(calls) == runs
    always = bundle({name: {} for name in SWITCH})
    always.load_state_dict(made.state_dict())
    alone = always(batch(0.0))
    torch.testing.assert_close({n: parts[n] for n in active}, {n: alone[n] for n in active})
    torch.testing.assert_close(parts["loss"], sum(parts[name] for name in active))
    assert made.needs_teachers(progress) == bool(runs)


@pytest.mark.parametrize("progress", [0.0, 0.3, 0.9])
def test_every_trained_weight_has_a_gradient_in_every_step(progress):
    """0 for those that no active term reads: no optimizer may skip them on a rank or at a stage."""
    made = bundle(SWITCH)
    made(batch(progress))["loss"].backward()
    gradients = {name: p.grad for name, p in made.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    read = {name for name, g in gradients.items() if g is not None and bool((g != 0).any())}
    assert ("student.classifier.weight" in read) == (progress > 0)
    assert ("terms.hidden_mse.projections.big.weight" in read) == (progress < 0.5)


def test_a_point_without_a_term_is_refused():
    with pytest.raises(ValueError, match=r"no term is active at progress 0\.75"):
        bundle({"kl": {"until": 0.5}})(batch(0.75))


def test_an_entry_and_its_class_agree_on_teachers():
    for name, entry in TERMS.items():
        assert entry.load().needs_teachers == (entry.needs.teachers > 0), name


CPU = torch.device("cpu")


def test_a_logged_mean_is_over_the_steps_that_gave_it():
    """Two steps with one term and three with another between two readings."""
    meter, world = Meter(Timers(CPU)), SimpleNamespace(sum=lambda values: values, device=CPU)
    for step in range(5):
        name = "kl" if step < 2 else "cross_entropy"
        parts = {"loss": torch.tensor(float(step)), name: torch.tensor(float(step))}
        meter.add(parts, np.ones(4, dtype=np.int32))
    values, _ = meter.read(world)
    assert (values["loss"], values["kl"], values["cross_entropy"]) == (2.0, 0.5, 3.0)
    meter.add({"loss": torch.tensor(7.0)}, np.ones(4, dtype=np.int32))
    assert meter.read(world)[0]["loss"] == 7.0  # and from anew


def test_speed_is_that_of_the_steps_alone():
    """Not of the validation and the checkpoint between them, which had a part of the rate."""
    timers = Timers(CPU)
    meter, world = Meter(timers), SimpleNamespace(sum=lambda values: values, device=CPU)
    for _ in range(WARM_UP_STEPS):
        meter.add({"loss": torch.tensor(1.0)}, np.ones(4, dtype=np.int32))
    meter.read(world)
    for part in ("validation", "checkpoint", "forward"):
        timers.begin(part)
        time.sleep(0.3)
        timers.end()
    meter.add({"loss": torch.tensor(1.0)}, np.ones(600, dtype=np.int32))
    values, about = meter.read(world)
    seconds = about["timing"]["seconds"]
    assert seconds["validation"] >= 0.3 and seconds["checkpoint"] >= 0.3
    assert values["examples_per_second"] > 1.5 * 600 / sum(seconds.values()), (
        "3 times, but for load"
    )


def test_a_step_keeps_its_losses_and_launches_nothing():
    meter, world = Meter(Timers(CPU)), SimpleNamespace(sum=lambda values: values, device=CPU)
    given = [{"loss": torch.tensor(value), "kl": torch.tensor(1.0)} for value in (3.0, 4.0, 8.0)]
    with torch.profiler.profile() as profile:
        for losses in given:
            meter.add(losses, np.ones(4, dtype=np.int32))
    assert not profile.key_averages()
    values, _ = meter.read(world)
    assert (values["loss"], values["kl"]) == (5.0, 1.0)


# ------------------------------------------------------------------------------------ recipes


def recipe(tmp_path, losses, *overrides, **phase):
    distil = {"losses": losses, "keep": "last", **phase}
    content = {
        "task": {"type": "single-label", "data": {"path": "data"}, "labels": ["a", "b"]},
        "teachers": {"big": {"model": "big"}},
        "student": {"model": "small"},
        "phases": [{"distil": distil}],
    }
    return runs.loaded(content, tmp_path, *overrides)


def test_a_recipe_says_from(tmp_path):
    loaded = recipe(tmp_path, {"kl": {"from": 0.25}}, "phases.distil.losses.kl.from=0.5")
    assert loaded.phases[0].losses["kl"].start == 0.5
    text = dump_recipe(loaded)
    written = yaml.safe_load(text)["phases"][0]["distil"]["losses"]["kl"]
    assert written["from"] == 0.5 and "start" not in written
    (tmp_path / "again.yaml").write_text(text)
    assert load_recipe(tmp_path / "again.yaml") == loaded


@pytest.mark.parametrize(
    ("losses", "keep"),
    [
        ({"kl": {"until": 0.5}, "cross_entropy": {"from": 0.5}}, "last"),
        ({"kl": {"until": 0.5}, "cross_entropy": {}}, "best"),
        (
            {"kl": {"until": 0.6}, "cross_entropy": {"from": 0.4}, "logit_mse": {"until": 0.1}},
            "last",
        ),
    ],
)
def test_terms_may_meet_and_overlap(losses, keep, tmp_path):
    assert [*phase_mistakes(recipe(tmp_path, losses, keep=keep))] == []
