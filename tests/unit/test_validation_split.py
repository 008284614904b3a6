"""The fitting part does not choose: a split that both read is split in two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.check.check import check_data
from ds_distill.data import validation_split
from ds_distill.data.batches import Examples
from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.evaluation.scores import build_metric
from ds_distill.keys import content_keys
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.policies import Average, LearnedGate
from ds_distill.recipe.schema import LONE_TASK, Recipe
from ds_distill.routing import Asked, fit
from ds_distill.routing.held_out import at, routed
from ds_distill.routing.policies import NOTHING
from ds_distill.training.validation import validation_of
from ds_distill.types import Batch, Signals

CHOOSING = "validation"


def examples_of(texts, labels=None, groups=None):
    keys = torch.from_numpy(content_keys(texts))
    labels = np.zeros(len(texts), dtype=np.int64) if labels is None else np.asarray(labels)
    if groups is not None:
        groups = torch.tensor(groups)[:, None].repeat(1, 2)
    return Examples(keys, labels, groups)


def fitting_part(examples, split, seed):
    return validation_split.fitting_part(examples.strata, examples.groups, split, seed)


def choosing_part(examples, fitted, seed):
    others = {split: one.groups for split, one in fitted.items()}
    return validation_split.choosing_part(examples.strata, examples.groups, others, seed)


def numbered(count, **options):
    return examples_of([f"text {number}" for number in range(count)], **options)


@settings(max_examples=40, deadline=None)
@given(st.integers(120, 400), st.integers(0, 2**31 - 1), st.booleans())
def test_each_labelled_example_fits_or_chooses_whatever_the_order(count, seed, grouped):
    draw = np.random.default_rng(seed)
    numbers = draw.integers(0, count, count)  # some stand twice
    texts = [f"text {number}" for number in numbers]
    labels = draw.integers(-1, 3, count)
    labels[:100] = 0
    groups = (numbers // 3).tolist() if grouped else None
    examples = examples_of(texts, labels, groups)
    fits = fitting_part(examples, CHOOSING, seed)
    chooses = choosing_part(examples, {CHOOSING: examples}, seed)
    assert not set(fits) & set(chooses)
    assert set(np.flatnonzero(labels >= 0)) <= set(fits) | set(chooses)
    assert (labels[fits] >= 0).all()
    assert not {texts[i] for i in fits} & {texts[i] for i in chooses}, "a text is in one part"
    if grouped:
        assert not {groups[i] for i in fits} & {groups[i] for i in chooses}
    order = draw.permutation(count)
    chosen = choosing_part(examples.at(order), {CHOOSING: examples.at(order)}, seed)
    assert set(order[chosen]) == set(chooses)


def test_the_parts_are_halves_and_another_seed_deals_anew():
    examples = numbered(4000)
    parts = [set(fitting_part(examples, CHOOSING, seed)) for seed in (0, 1)]
    for part in parts:
        assert len(part) == 2000
    assert abs(len(parts[0] & parts[1]) - 1000) < 4 * 750**0.5


def test_a_split_of_its_own_fits_whole_and_all_of_validation_chooses_but_what_it_holds():
    validation = examples_of(["a", "b", "c", "b", "d"])
    fitted = numbered(30)
    assert len(fitting_part(fitted, "train", 0)) == 30
    np.testing.assert_array_equal(choosing_part(validation, {}, 0), range(5))
    np.testing.assert_array_equal(choosing_part(validation, {"train": fitted}, 0), range(5))
    fitted = examples_of(["b", "z", "d", *map(str, range(30))])
    np.testing.assert_array_equal(choosing_part(validation, {"train": fitted}, 0), [0, 2])
    # Two expertise phases: what neither fitted on.
    validation = numbered(60)
    fitted = validation.at(np.arange(0, 60, 3))
    both = choosing_part(validation, {"train": fitted, CHOOSING: validation}, 0)
    alone = choosing_part(validation, {CHOOSING: validation}, 0)
    assert list(both) == [i for i in alone if i % 3] and len(both) < len(alone)


def test_too_few_examples_are_refused_with_the_counts():
    with pytest.raises(UserError, match=r"'train' has 19 labelled examples, but .* at least 20"):
        fitting_part(numbered(19), "train", 0)
    assert len(fitting_part(numbered(20), "train", 0)) == 20
    with pytest.raises(UserError, match=r"'validation' has 25 .* of which 1\d may be fitted on"):
        fitting_part(numbered(25), CHOOSING, 0)
    examples = numbered(30)
    with pytest.raises(UserError, match=r"all of its 30 examples .*none is left to choose"):
        choosing_part(examples, {"train": examples}, 0)


def test_a_run_that_could_not_fit_is_refused_before_it_starts(toy_settings, tmp_path):
    """Also where a cap leaves too few of many."""
    caps = {"validation": 10, "train": 9}
    data = {**toy_settings["task"]["data"], "per_class": caps}
    settings = {**toy_settings, "task": {**toy_settings["task"], "data": data}}
    recipe = Recipe.model_validate(settings)
    with pytest.raises(UserError, match=r"'validation' has 30 labelled examples, of which 1\d may"):
        check_data(recipe, {LONE_TASK: open_source(recipe.tasks_by_name[LONE_TASK], tmp_path)})
    caps["validation"] = 20
    recipe = Recipe.model_validate(settings)
    check_data(recipe, {LONE_TASK: open_source(recipe.tasks_by_name[LONE_TASK], tmp_path)})


def noise(count, width, seed):
    """Two teachers that know nothing, with states of pure noise, and labels by lot."""
    generator = torch.Generator().manual_seed(seed)
    signals = {
        name: Signals(
            torch.randn(count, 4, generator=generator),
            {-1: torch.randn(count, width, generator=generator)},
        )
        for name in ("first", "second")
    }
    return signals, torch.randint(4, (count,), generator=generator).numpy()


@pytest.mark.parametrize("seed", range(3))
def test_a_gate_that_memorised_does_not_win_on_the_part_that_chooses(seed):
    """Its target on what it was fitted on beats the average's beyond chance, of noise; on the
    examples that choose it does not."""
    signals, truth = noise(600, 200, seed)
    examples = numbered(600, labels=truth)
    split_parts = {
        "fits": fitting_part(examples, CHOOSING, seed),
        "chooses": choosing_part(examples, {CHOOSING: examples}, seed),
    }
    rows = torch.from_numpy(split_parts["fits"])
    fitted = fit(at(signals, rows), truth[split_parts["fits"]], examples.keys[rows], list("abcd"))
    intervals = {}
    for what, part in split_parts.items():
        here = at(signals, torch.from_numpy(part))
        batch = Batch(examples.keys[torch.from_numpy(part)], {}, torch.full((len(part),), -100), {})
        states = {name: outputs.hidden[-1] for name, outputs in here.items()}
        seen = Asked(NOTHING, batch, here, states=states, fitted=fitted)
        gate, average = (
            ClassPredictions(routed(seen, routing).logits.numpy(), truth[part])
            for routing in (LearnedGate(), Average())
        )
        accuracy = build_metric("classes", Accuracy.Settings(), "abcd")
        intervals[what] = paired_interval(gate, average, accuracy)
    assert intervals["fits"][0] > 0.02, "the test must have something to find"
    assert intervals["chooses"][0] <= 0


def test_a_split_without_labels_does_not_choose():
    """`keep: last` was refused at the end of the first epoch."""
    examples = numbered(60, labels=[-1] * 60)
    data = SimpleNamespace(has_split=lambda split: True, examples=lambda split: examples)
    recipe = SimpleNamespace(seed=0, fitted_splits=lambda task: [])
    run: Any = SimpleNamespace(
        data=data, recipe=recipe, task_name="task", task=SimpleNamespace(reads_labels=True)
    )
    assert validation_of(run, {}) is None
