"""Metrics against slow transcriptions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.evaluation.baseline import Unigram, majority_class
from ds_distill.evaluation.metrics import (
    TokenScores,
    accuracy,
    classification_report,
    masked_lm_report,
    paired_interval,
)

NAMES = ["a", "b", "c", "d"]


def report_by_hand(predictions, labels, names):
    pairs = [(p, t) for p, t in zip(predictions, labels, strict=True) if t >= 0]
    per_class, scores = {}, []
    for index, name in enumerate(names):
        right = sum(p == t == index for p, t in pairs)
        there = sum(t == index for _, t in pairs)
        outputs = sum(p == index for p, _ in pairs)
        per_class[name] = right / there if there else None
        if there or outputs:
            scores.append(2 * right / (there + outputs))
    return {
        "examples": len(pairs),
        "accuracy": sum(p == t for p, t in pairs) / len(pairs),
        "macro_f1": sum(scores) / len(scores),
        "per_class": per_class,
        "confusion": [
            [sum((p, t) == (outputs, truth) for p, t in pairs) for outputs in range(len(names))]
            for truth in range(len(names))
        ],
    }


@pytest.mark.filterwarnings("error")
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=40).filter(
        lambda pairs: any(label >= 0 for _, label in pairs)
    )
)
def test_a_report_is_what_the_definitions_say(pairs):
    predictions, labels = map(list, zip(*pairs, strict=True))
    logits = np.eye(4)[predictions] * 3 - 1
    report = classification_report(logits, np.array(labels), NAMES)
    wanted = report_by_hand(predictions, labels, NAMES)
    for name in ("examples", "per_class", "confusion"):
        assert report[name] == wanted[name]
    for name in ("accuracy", "macro_f1"):
        assert report[name] == pytest.approx(wanted[name])
    assert accuracy(logits, np.array(labels)) == pytest.approx(wanted["accuracy"])


def test_a_class_that_is_not_there():
    logits = np.eye(3)[[0, 0, 1, 1]]
    report = classification_report(logits, np.array([0, 0, 1, 0]), ["a", "b", "missing"])
    assert report["per_class"] == {"a": pytest.approx(2 / 3), "b": 1.0, "missing": None}
    assert report["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    # Predicted without being there, it counts: that is a mistake.
    logits = np.eye(3)[[0, 2, 1, 1]]
    report = classification_report(logits, np.array([0, 0, 1, 0]), ["a", "b", "missing"])
    assert report["macro_f1"] == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)


# ---------------------------------------------------------------------- paired interval


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
    low, high = paired_interval(one, other, seed=seed)
    difference = one.mean() - other.mean()
    assert low - 1e-9 <= difference <= high + 1e-9
    mirrored = paired_interval(other, one, seed=seed + 100, resamples=20_000)
    slack = 0.15 * (high - low) + 1.5 / len(one)
    assert mirrored == pytest.approx((-high, -low), abs=slack)


@pytest.mark.parametrize("size", [200, 2000, 20_000])
def test_the_interval_is_as_wide_as_theory_says(size):
    one, other = answers(size // 2, size // 5, size // 10, size // 5)
    low, high = paired_interval(one, other, resamples=20_000)
    values = one.astype(float) - other
    wanted = values.mean() + np.array([-1.96, 1.96]) * values.std() / np.sqrt(size)
    width = wanted[1] - wanted[0]
    np.testing.assert_allclose([low, high], wanted, atol=0.06 * width + 1 / size)


def test_more_examples_narrow_the_interval():
    widths = []
    for size in (100, 1000, 10_000):
        low, high = paired_interval(*answers(size // 2, size // 5, size // 10, size // 5))
        widths.append(high - low)
    assert widths[0] > 2.5 * widths[1] > 6 * widths[2]


def test_the_interval_is_the_same_each_time_and_whatever_the_order():
    one, other = answers(50, 20, 10, 30)
    order = np.random.default_rng(0).permutation(len(one))
    wanted = paired_interval(one, other)
    assert paired_interval(one, other) == wanted
    assert paired_interval(one[order], other[order]) == wanted
    assert paired_interval(one, other, seed=1) != wanted


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for number in range(300):
        resamples = generator.multinomial(400, [0.5, 0.2, 0.12, 0.18])
        low, high = paired_interval(*answers(*resamples), seed=number, resamples=1000)
        hits += low <= 0.2 - 0.12 <= high
    # 95% of 300 is 285; 99.9% of binomial draws lie between 272 and 296.
    assert 272 <= hits <= 296


def test_equal_models_have_no_interval():
    one, _ = answers(30, 0, 0, 20)
    assert paired_interval(one, one) == (0.0, 0.0)


def test_copies_of_an_example_in_a_group_do_not_narrow_the_interval():
    one, other = answers(50, 20, 10, 30)
    wanted = paired_interval(one, other, resamples=20_000)
    copies = [np.repeat(values, 5) for values in (one, other)]
    groups = np.repeat(np.random.default_rng(0).permutation(len(one)), 5)
    low, high = paired_interval(*copies, groups=groups, resamples=20_000)
    assert (low, high) == pytest.approx(wanted, abs=0.01)
    low, high = paired_interval(*copies, resamples=20_000)
    assert high - low < 0.6 * (wanted[1] - wanted[0])


def test_groups_of_one_are_examples():
    one, other = answers(50, 20, 10, 30)
    tokens = np.random.default_rng(0).integers(1, 4, len(one))
    wanted = paired_interval(one, other, tokens)
    assert paired_interval(one, other, tokens, groups=np.arange(len(one)) * 7) == wanted


# ----------------------------------------------------------------------------- baselines


@settings(deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40).filter(lambda x: max(x) >= 0))
def test_the_majority_is_the_commonest_label_and_of_equals_the_first(labels):
    known = [label for label in labels if label >= 0]
    most = max(known.count(label) for label in known)
    assert majority_class(np.array(labels)) == min(x for x in known if known.count(x) == most)


def test_a_unigram_is_what_counting_says():
    """Six tokens, of which 0 and 1 are special; 5 never stands in the training text."""
    text = [0, 2, 2, 3, 1, 0, 2, 4, 1]
    unigram = Unigram.of(np.bincount(text, minlength=6), (0, 1))
    probability = {2: 4 / 9, 3: 2 / 9, 4: 2 / 9, 5: 1 / 9}  # one more of each
    hidden, example = np.array([2, 5, 3, 2, 2]), np.array([0, 0, 2, 2, 2])
    scores = unigram.score(hidden, example, 4)
    wanted = [[2, 5], [], [3, 2, 2], []]
    np.testing.assert_allclose(
        scores.loss, [sum(-np.log(probability[token]) for token in tokens) for tokens in wanted]
    )
    np.testing.assert_array_equal(scores.right, [tokens.count(2) for tokens in wanted])
    np.testing.assert_array_equal(scores.tokens, [len(tokens) for tokens in wanted])
    assert np.exp(unigram.log_probs).sum() == pytest.approx(1)


def test_masked_lm_report_is_over_tokens_not_texts():
    """Three texts with 4, 1 and 0 hidden tokens."""
    scores = TokenScores(
        loss=np.array([6.0, 4.0, 0.0]), right=np.array([3.0, 0.0, 0.0]), tokens=np.array([4, 1, 0])
    )
    assert masked_lm_report(scores) == {
        "examples": 3,
        "tokens": 5,
        "accuracy": 3 / 5,
        "loss": 2.0,
        "perplexity": pytest.approx(np.exp(2.0), rel=1e-12),
    }
