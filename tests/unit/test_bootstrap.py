"""Intervals of differences between two models."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.evaluation import bootstrap
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import ClassPredictions, LabelPredictions, TokenScores
from ds_distill.evaluation.scores import build_metric
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


@settings(max_examples=40, deadline=None)
@given(*[st.integers(0, 60)] * 4, st.integers(0, 3))
def test_the_interval_holds_the_difference(both, first, second, neither, seed):
    if both + first + second + neither == 0:
        return
    one, other = answers(both, first, second, neither)
    low, high = interval(one, other, seed=seed)
    difference = one.mean() - other.mean()
    assert low - 1e-9 <= difference <= high + 1e-9
    mirrored = interval(other, one, seed=seed + 100, resamples=20_000)
    slack = 0.15 * (high - low) + 1.5 / len(one)
    assert mirrored == pytest.approx((-high, -low), abs=slack)


@pytest.mark.parametrize("size", [200, 2000, 20_000])
def test_the_interval_is_as_wide_as_theory_says(size):
    one, other = answers(size // 2, size // 5, size // 10, size // 5)
    low, high = interval(one, other, resamples=20_000)
    values = one.astype(float) - other
    wanted = values.mean() + np.array([-1.96, 1.96]) * values.std() / np.sqrt(size)
    width = wanted[1] - wanted[0]
    np.testing.assert_allclose([low, high], wanted, atol=0.06 * width + 1 / size)


def test_more_examples_narrow_the_interval():
    widths = []
    for size in (100, 1000, 10_000):
        low, high = interval(*answers(size // 2, size // 5, size // 10, size // 5))
        widths.append(high - low)
    assert widths[0] > 2.5 * widths[1] > 6 * widths[2]


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


@settings(max_examples=60, deadline=None)
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


def test_equal_models_have_no_interval():
    one, _ = answers(30, 0, 0, 20)
    assert interval(one, one) == (0.0, 0.0)


def test_copies_of_an_example_in_a_group_do_not_narrow_the_interval():
    one, other = answers(50, 20, 10, 30)
    wanted = interval(one, other, resamples=20_000)
    copies = [np.repeat(values, 5) for values in (one, other)]
    groups = np.repeat(np.random.default_rng(0).permutation(len(one)), 5)
    low, high = interval(*copies, groups=groups, resamples=20_000)
    assert (low, high) == pytest.approx(wanted, abs=0.01)
    low, high = interval(*copies, resamples=20_000)
    assert high - low < 0.6 * (wanted[1] - wanted[0])


def test_groups_of_one_are_examples():
    one, other = answers(50, 20, 10, 30)
    tokens = np.random.default_rng(0).integers(1, 4, len(one))
    wanted = interval(one, other, tokens)
    assert interval(one, other, tokens, groups=np.arange(len(one)) * 7) == wanted


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=30), st.integers(1, 4))
def test_the_interval_of_tokens(examples, repeats):
    first, second, more = np.array(examples * repeats).T
    tokens = np.maximum(first, second) + more
    if tokens.sum() == 0:
        return
    low, high = interval(first, second, tokens)
    difference = (first.sum() - second.sum()) / tokens.sum()
    assert low - 1e-9 <= difference <= high + 1e-9 or len(first) < 5
    assert -1 <= low <= high <= 1


def test_tokens_of_one_text_do_not_count_as_independent():
    """100 texts that are all right or all wrong, of 10 tokens each: as wide as 100 answers."""
    generator = np.random.default_rng(0)
    right = generator.random(100) < 0.6
    ten = interval(right * 10, np.zeros(100), np.full(100, 10), resamples=20_000)
    one = interval(right, np.zeros(100), resamples=20_000)
    assert ten == pytest.approx(one, abs=0.011)


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


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_interval_of_any_metric_is_that_of_drawn_examples(name, grouped):
    metric = build_metric("classes", CLASSES[name], "abc")
    first, second = two_models(300)
    groups = np.random.default_rng(0).permutation(300) // 5 * 11
    numbers = groups if grouped else np.arange(300)
    found = paired_interval(first, second, metric, groups=groups if grouped else None)
    wanted = by_hand(first, second, metric, numbers)
    width = wanted[1] - wanted[0]
    np.testing.assert_allclose(found, wanted, atol=0.2 * width)
    assert found[0] < metric.value(first) - metric.value(second) < found[1]


@pytest.mark.parametrize("name", CLASSES)
def test_copies_in_a_group_leave_the_interval_of_any_metric(name):
    metric = build_metric("classes", CLASSES[name], "abc")
    wanted = paired_interval(*two_models(200), metric, resamples=4000)
    groups = np.repeat(np.random.default_rng(0).permutation(200), 3)
    found = paired_interval(*two_models(200, copies=3), metric, groups=groups, resamples=4000)
    assert found == pytest.approx(wanted, abs=0.1 * (wanted[1] - wanted[0]))


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_model_twice_has_no_interval(name):
    first, _ = two_models(50)
    metric = build_metric("classes", CLASSES[name], "abc")
    assert paired_interval(first, first, metric) == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize(
    "settings", [Accuracy.Settings(), Loss.Settings(), Perplexity.Settings()], ids=lambda s: s.name
)
def test_the_intervals_of_masked_tokens(settings):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 9, 200).astype(float)
    first, second = (
        TokenScores(generator.gamma(2.0, 1.0, 200) * tokens, np.floor(share * tokens), tokens)
        for share in (0.6, 0.5)
    )
    metric = build_metric("masked tokens", settings)
    wanted = by_hand(first, second, metric, np.arange(200))
    found = paired_interval(first, second, metric)
    np.testing.assert_allclose(found, wanted, atol=0.2 * (wanted[1] - wanted[0]))


@pytest.mark.parametrize(
    "settings", [MicroF1.Settings(), MacroF1.Settings(), MacroAUC.Settings()], ids=lambda s: s.name
)
def test_the_intervals_of_labels(settings):
    generator = np.random.default_rng(0)
    labels = generator.integers(-1, 2, (150, 4))
    first, second = (
        LabelPredictions(generator.normal(size=(150, 4)) + strength * labels, labels)
        for strength in (1.0, 0.5)
    )
    metric = build_metric("labels", settings, "abcd")
    wanted = by_hand(first, second, metric, np.arange(150))
    found = paired_interval(first, second, metric)
    np.testing.assert_allclose(found, wanted, atol=0.2 * (wanted[1] - wanted[0]))


def test_draws_without_a_value_are_left_out():
    """One example of three is of the class: in 30% of the draws there is none."""
    first = ClassPredictions(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), np.array([1, 0, 0]))
    second = ClassPredictions(-first.logits, first.labels)
    metric = build_metric("classes", AUC.Settings(), "ab")
    low, high = paired_interval(first, second, metric)
    assert (low, high) == (-1.0, 1.0)
    alone = at(first, [0])
    assert np.isnan(paired_interval(alone, alone, metric)).all()


@pytest.mark.parametrize("at_once", [10**8, 300, 7])
def test_there_are_as_many_draws_as_asked_for(at_once, monkeypatch):
    monkeypatch.setattr(bootstrap, "_AT_ONCE", at_once)
    draws = np.concatenate([*bootstrap._draws(np.array([2, 3]), np.random.default_rng(0), 101)])
    assert draws.shape == (101, 2) and (draws.sum(axis=1) == 5).all()


def test_the_memory_of_a_bootstrap_is_bounded(monkeypatch):
    """In parts, the draws are those of one whole."""
    metrics = [build_metric("classes", CLASSES[name], "abc") for name in ("macro_f1", "auc")]
    models = two_models(100)
    whole = [paired_interval(*models, metric) for metric in metrics]
    monkeypatch.setattr(bootstrap, "_AT_ONCE", 999)
    sizes = []
    draws = bootstrap._draws
    monkeypatch.setattr(
        bootstrap,
        "_draws",
        lambda *given: (sizes.append(part.size) or part for part in draws(*given)),
    )
    assert [paired_interval(*models, metric) for metric in metrics] == whole
    assert max(sizes) <= 999 and len(sizes) > 100
