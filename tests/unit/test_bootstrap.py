"""Intervals of differences between two models."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.evaluation import bootstrap
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    TokenScores,
)
from ds_distill.evaluation.scores import build_metric
from ds_distill.recipe.metrics import METRICS as OVER
from ds_distill.recipe.metrics.classes import AUC, ECE, F1, Accuracy, MacroAUC, MacroF1, MicroF1
from ds_distill.recipe.metrics.tokens import Loss, Perplexity

TOKENS = build_metric("masked tokens", Accuracy.Settings())


def interval(one, other, tokens=None, **options):
    """Of the accuracy, of how many right predictions each example has."""
    tokens = np.ones(len(one)) if tokens is None else tokens
    first, second = (
        TokenScores(np.zeros(len(one)), np.asarray(right, float), np.asarray(tokens, float))
        for right in (one, other)
    )
    return paired_interval(first, second, TOKENS, **options)


def answers(both, first, second, neither):
    """Two models' answers: examples both get right, one alone, none."""
    pairs = [(True, True)] * both + [(True, False)] * first + [(False, True)] * second
    one, other = np.array(pairs + [(False, False)] * neither).T
    return one, other


def test_the_interval_is_the_same_each_time_and_whatever_the_order():
    one, other = answers(50, 20, 10, 30)
    order = np.random.default_rng(0).permutation(len(one))
    wanted = interval(one, other)
    assert interval(one, other) == wanted
    assert interval(one[order], other[order]) == wanted
    assert interval(one, other, seed=1) != wanted


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for number in range(300):
        resamples = generator.multinomial(400, [0.5, 0.2, 0.12, 0.18])
        low, high = interval(*answers(*resamples), seed=number, resamples=1000)
        hits += low <= 0.2 - 0.12 <= high
    # 95% of 300 is 285; 99.9% of binomial draws lie between 272 and 296.
    assert 272 <= hits <= 296


@settings(max_examples=15)
@given(*[st.integers(0, 40)] * 4, st.sampled_from(["accuracy", "macro_f1", "auc", "ece"]))
def test_two_models_the_other_way_round_have_the_same_interval(both, first, second, neither, name):
    """To the last bit, ties and metrics that are not always defined included."""
    if both + first + second + neither == 0:
        return
    one, other = answers(both, first, second, neither)
    labels = np.arange(len(one)) % 2
    models = [
        ClassPredictions(
            np.stack([(labels == 0) == right, (labels == 1) == right], axis=1).astype(float), labels
        )
        for right in (one, other)
    ]
    metric = build_metric(
        "classes", {**CLASSES, "auc": AUC.Settings(), "ece": ECE.Settings()}[name], "ab"
    )
    given = {"groups": np.arange(len(one)) // 2, "resamples": 100}
    low, high = paired_interval(*models, metric, **given)
    mirrored = paired_interval(*reversed(models), metric, **given)
    np.testing.assert_array_equal(mirrored, (-high, -low))


def test_accuracys_interval_is_that_of_earlier_versions():
    """Published figures do not move with the code: drawn from the same kinds in the same order."""
    one, other = answers(50, 20, 10, 30)
    assert interval(one, other) == (-0.00909090909090909, 0.19090909090909092)


# ------------------------------------------------------------------------------ any metric

CLASSES = {
    "accuracy": Accuracy.Settings(),
    "f1": F1.Settings(positive="b"),
    "micro_f1": MicroF1.Settings(leave_out=["a"]),
    "macro_f1": MacroF1.Settings(),
    "auc": AUC.Settings(positive="c"),
    "ece": ECE.Settings(),
}


def two_models(size, seed=0, copies=1):
    """Of examples of three classes, the first model's predictions are better."""
    generator = np.random.default_rng(seed)
    labels = generator.choice(3, size, p=[0.5, 0.3, 0.2])
    models = []
    for strength in (1.5, 1.0):
        logits = generator.normal(size=(size, 3))
        logits[np.arange(size), labels] += strength
        models.append(
            ClassPredictions(np.repeat(logits, copies, axis=0), np.repeat(labels, copies))
        )
    return models


def at(predictions, rows):
    return type(predictions)(**{name: a[rows] for name, a in predictions.arrays().items()})


def by_hand(first, second, metric, groups, resamples=400):
    """Whole examples, drawn one by one."""
    generator = np.random.default_rng(1)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    found = []
    for _ in range(resamples):
        drawn = generator.integers(len(members), size=len(members))
        rows = np.concatenate([members[group] for group in drawn])
        found.append(metric.value(at(first, rows)) - metric.value(at(second, rows)))
    return np.nanquantile(found, [0.025, 0.975])


def of_tokens(size):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 9, size).astype(float)
    return [
        TokenScores(generator.gamma(2.0, 1.0, size) * tokens, np.floor(share * tokens), tokens)
        for share in (0.6, 0.5)
    ]


def of_labels(size):
    generator = np.random.default_rng(0)
    labels = generator.integers(-1, 2, (size, 4))
    return [
        LabelPredictions(generator.normal(size=(size, 4)) + strength * labels, labels)
        for strength in (1.0, 0.5)
    ]


def of_numbers(size):
    generator = np.random.default_rng(0)
    truth = generator.normal(size=size)
    noises = (generator.normal(0, scale, size) for scale in (0.5, 1.0))
    return [NumberPredictions(truth + noise, truth) for noise in noises]


METRICS = [
    *(("classes", one, "abc", two_models) for one in CLASSES.values()),
    *(("masked tokens", one.Settings(), None, of_tokens) for one in (Accuracy, Loss, Perplexity)),
    *(("labels", one.Settings(), "abcd", of_labels) for one in (MicroF1, MacroF1, MacroAUC)),
    *(("numbers", one.Settings(), None, of_numbers) for one in OVER["numbers"].values()),
]


@pytest.mark.parametrize(("over", "settings", "names", "models"), METRICS)
def test_the_interval_of_any_metric_is_that_of_drawn_examples(over, settings, names, models):
    """One by one, and by whole groups."""
    metric = build_metric(over, settings, *([names] if names else []))
    first, second = models(200)
    groups = np.random.default_rng(0).permutation(200) // 5 * 11
    for own, numbers in ((None, np.arange(200)), (groups, groups)):
        found = paired_interval(first, second, metric, groups=own)
        wanted = by_hand(first, second, metric, numbers)
        np.testing.assert_allclose(found, wanted, atol=0.2 * (wanted[1] - wanted[0]))
        assert found[0] < metric.value(first) - metric.value(second) < found[1]
    low, high = paired_interval(first, first, metric)
    assert (low, high) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_draws_without_a_value_are_left_out():
    """One example of three is of the class: in 30% of the draws there is none."""
    first = ClassPredictions(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), np.array([1, 0, 0]))
    second = ClassPredictions(-first.logits, first.labels)
    metric = build_metric("classes", AUC.Settings(), "ab")
    low, high = paired_interval(first, second, metric)
    assert (low, high) == (-1.0, 1.0)
    alone = at(first, [0])
    assert np.isnan(paired_interval(alone, alone, metric)).all()


def test_draws_in_parts_are_those_of_one_whole(monkeypatch):
    metrics = [build_metric("classes", CLASSES[name], "abc") for name in ("macro_f1", "auc")]
    models = two_models(100)
    whole = [paired_interval(*models, metric) for metric in metrics]
    monkeypatch.setattr(bootstrap, "_AT_ONCE", 999)
    assert [paired_interval(*models, metric) for metric in metrics] == whole
