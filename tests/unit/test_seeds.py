"""What chance adds to the mean of several seeds on the same test examples."""

import numpy as np
import pytest

from ds_distill.evaluation.bootstrap import mean_interval, resampled, variance_of_examples
from ds_distill.evaluation.predictions import TokenScores
from ds_distill.evaluation.scores import build_metric
from ds_distill.recipe.metrics.classes import Accuracy

ACCURACY = build_metric("masked tokens", Accuracy.Settings())
EXAMPLES = 120

# Predictions are made with another seed than draws: with the same the first draw would choose
# those that are right.


def scores(right):
    return TokenScores(np.zeros(len(right)), right.astype(float), np.ones(len(right)))


def beyond_chance(generator, count, **of):
    """Whether two equal settings are taken for different, by which intervals.

    of: standard deviations of the logit of being right: of what examples do to one setting at all
        seeds, of seeds, and of what is left.
    """
    examples = generator.normal(0.5, 1.5, EXAMPLES)
    drawn, values = [], []
    for _ in "ab":
        own = examples + generator.normal(0, of["examples"], EXAMPLES)
        right = [
            own + generator.normal(0, of["seeds"]) + generator.normal(0, of["rest"], EXAMPLES) > 0
            for _ in range(count)
        ]
        models = [scores(of_seed) for of_seed in right]
        draws = [resampled(model, ACCURACY, resamples=100) for model in models]
        drawn.append(np.stack(draws, axis=1))
        values.append([ACCURACY.value(model) for model in models])
    apart = [a - b for a, b in zip(*values, strict=True)]
    resamples = drawn[0] - drawn[1]
    chosen = generator.integers(0, count, resamples.shape)
    of_both = np.take_along_axis(resamples, chosen, axis=1).mean(axis=1)
    low, high = mean_interval(apart, variance_of_examples(resamples)) or (0, 0)
    alone = mean_interval(apart) or (0, 0)
    hierarchical = np.quantile(of_both, [0.025, 0.975])
    return {
        "both": not low <= 0 <= high,
        "seeds alone": not alone[0] <= 0 <= alone[1],
        "hierarchical bootstrap": not hierarchical[0] <= 0 <= hierarchical[1],
    }


CASES = [  # seeds, examples, seeds, rest; at most so often by seeds alone, by the bootstrap
    (3, 2.0, 0.0, 0.2, 0.40, 0.0),
    (3, 0.5, 0.5, 0.5, 0.0, 0.12),
]


@pytest.mark.parametrize(("seeds", "examples", "of_seeds", "rest", "alone", "boot"), CASES)
def test_equal_settings_are_taken_for_different_in_about_one_case_of_twenty(
    seeds, examples, of_seeds, rest, alone, boot
):
    """Whatever is the larger: seeds or examples. Intervals over seeds alone say it in 15 to 47% of
    cases where examples are; resampled seeds and examples in 19% where three seeds are."""
    generator = np.random.default_rng(1)
    cases = [
        beyond_chance(generator, seeds, examples=examples, seeds=of_seeds, rest=rest)
        for _ in range(200)
    ]
    share = {name: np.mean([case[name] for case in cases]) for name in cases[0]}
    # 99.9% of binomial draws of 5% in 200 are at most 10.5%.
    assert 0.0 <= share["both"] <= 0.08
    assert share["seeds alone"] >= alone and share["hierarchical bootstrap"] >= boot


def test_large_differences_are_found():
    generator = np.random.default_rng(1)
    right = [generator.random(400) < share for share in (0.6, 0.62, 0.61, 0.8, 0.79, 0.81)]
    drawn = np.stack([resampled(scores(of_seed), ACCURACY) for of_seed in right], axis=1)
    values = [a.mean() - b.mean() for a, b in zip(right[3:], right[:3], strict=True)]
    low, high = mean_interval(values, variance_of_examples(drawn[:, 3:] - drawn[:, :3])) or (0, 0)
    assert 0.05 < low < high < 0.35


def test_with_one_seed_the_interval_is_over_the_examples():
    right = np.random.default_rng(1).random(500) < 0.7
    variance = variance_of_examples(resampled(scores(right), ACCURACY, resamples=4000)[:, None])
    wanted = right.mean() + np.array([-1.96, 1.96]) * right.std() / 500**0.5
    assert mean_interval([right.mean()], variance) == pytest.approx(wanted, abs=0.003)
    assert mean_interval([0.7]) is None


def test_what_examples_do_to_one_seed_alone_is_counted_once():
    """Seeds that differ by what they do on single examples: that is in how they differ."""
    generator = np.random.default_rng(1)
    models = [scores(generator.random(2000) < 0.5) for _ in range(4)]
    drawn = np.stack([resampled(model, ACCURACY) for model in models], axis=1)
    alone = variance_of_examples(drawn[:, :1])
    shared = variance_of_examples(drawn)
    assert alone == pytest.approx(0.25 / 2000, rel=0.15)
    assert shared is not None and shared < 0.1 * alone


def test_draws_are_the_same_for_all_models_and_groups_are_drawn_whole():
    right = np.random.default_rng(1).random(60) < 0.5
    groups = np.arange(60) // 6 * 7
    one, other = (resampled(scores(r), ACCURACY, groups=groups) for r in (right, ~right))
    np.testing.assert_allclose(one + other, 1.0)
    whole = resampled(scores(groups < 35), ACCURACY, groups=groups)  # right in five groups of ten
    assert set(np.round(whole * 10) / 10) == set(np.round(whole, 12))
    undefined = np.full((5, 2), np.nan)
    assert variance_of_examples(undefined) is None
