"""Intervals of differences between two models, by resampling the examples."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ds_distill.process.activity import marked
from ds_distill.recipe.metrics.metric import CountMetric, Metric

_AT_ONCE = 2**22
"""Numbers that a part of the resamples holds at most: 32 MB."""


def paired_interval(
    first: Any,
    second: Any,
    metric: Metric[Any],
    *,
    groups: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> tuple[float, float]:
    """95% bootstrap interval of the difference of a metric, the first model's less the second's.

    first, second: predictions of the same N examples. Examples are resampled, not the tokens or
        labels of them: those of one text are not independent.
    groups: numbers of what the examples were taken from, int [N]; then groups are drawn, because
        examples of one file are not independent either.

    Resamples for which the metric is not defined are left out; both bounds are NaN where it is for
    none. The interval of the two the other way round is the same with the other sign.
    """
    # Which draws are made depends on the order of the two: the better one is the first.
    given = (groups, seed, resamples)
    lead = metric.value(first) - metric.value(second)
    if lead < 0:
        return _mirrored(_interval(second, first, metric, *given))
    found = _interval(first, second, metric, *given)
    if lead > 0:
        return found
    other = _mirrored(_interval(second, first, metric, *given))
    return (found[0] + other[0]) / 2, (found[1] + other[1]) / 2


def _mirrored(interval: tuple[float, float]) -> tuple[float, float]:
    return 0.0 - interval[1], 0.0 - interval[0]


def _interval(
    first: Any,
    second: Any,
    metric: Metric[Any],
    groups: np.ndarray | None,
    seed: int,
    resamples: int,
) -> tuple[float, float]:
    generator = np.random.default_rng(seed)
    group = _numbered(groups, len(first))
    if isinstance(metric, CountMetric):
        # Groups differ only in what they add to the sums, so that those of a kind are drawn
        # together.
        counts = metric.pair_counts(first, second)
        sums = np.zeros((group.max(initial=-1) + 1, counts.shape[1]))
        np.add.at(sums, group, counts)
        kinds, sizes = _kinds(sums)
        parts = [metric.difference(draws @ kinds) for draws in _draws(sizes, generator, resamples)]
    else:
        parts = [
            metric.weighted(first, weights) - metric.weighted(second, weights)
            for weights in _weights(group, generator, resamples)
        ]
    differences = np.concatenate(parts)
    defined = differences[~np.isnan(differences)]
    if not len(defined):
        return float("nan"), float("nan")
    low, high = np.quantile(defined, [0.025, 0.975])
    return float(low), float(high)


def resampled(
    predictions: Any,
    metric: Metric[Any],
    *,
    groups: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = 1000,
) -> np.ndarray:
    """A metric of a model's predictions on each of so many draws of the examples: float64
    [resamples], NaN where it is not defined. The draws are the same for all predictions of the same
    examples, in one process and in others, so that differences of two models are over the same.

    predictions, groups: as of `paired_interval`.
    """
    generator = np.random.default_rng(seed)
    group = _numbered(groups, len(predictions))
    of_each = _weights(group, generator, resamples)
    return np.concatenate([metric.weighted(predictions, weights) for weights in of_each])


def _numbered(groups: np.ndarray | None, count: int) -> np.ndarray:
    """The number of each example's group, from 0 on: int64 [count]."""
    if groups is None:
        return np.arange(count)
    return np.unique(groups, return_inverse=True)[1]


def _weights(
    group: np.ndarray, generator: np.random.Generator, resamples: int
) -> Iterator[np.ndarray]:
    """How often each example is drawn, with all of its group: float64 [R, N]."""
    for draws in _draws(np.ones(group.max(initial=-1) + 1), generator, resamples):
        yield draws[:, group].astype(np.float64)


def _draws(
    sizes: np.ndarray, generator: np.random.Generator, resamples: int
) -> Iterator[np.ndarray]:
    """How often each kind is drawn, int64 [R, kinds]; so many resamples at once as memory allows.

    sizes: how many there are of each kind, [kinds].
    """
    total = int(sizes.sum())
    step = max(1, _AT_ONCE // max(1, len(sizes)))
    for start in marked("resamples examples", range(0, resamples, step)):
        count = min(step, resamples - start)
        yield generator.multinomial(total, sizes / max(1, total), size=count)


def _kinds(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that differ, in lexical order, and how often each is there."""
    # Comparing bytes is much faster than comparing many columns, but its order means nothing.
    counts = np.ascontiguousarray(counts) + 0.0  # no -0.0
    whole = counts.view(np.dtype((np.void, counts.dtype.itemsize * counts.shape[1])))
    _, rows, sizes = np.unique(whole, return_index=True, return_counts=True)
    order = np.lexsort(counts[rows].T[::-1])
    return counts[rows][order], sizes[order]


_NORMAL = 1.959964
"""Standard deviations from the middle of a normal distribution to the ends of 95% of it."""


def variance_of_examples(resamples: np.ndarray) -> float | None:
    """The variance of the mean of S seeds' numbers that other test examples would cause, alike for
    all seeds: the mean covariance of two seeds over resamples of the examples. What examples do to
    one seed alone is part of how the seeds differ. Of one seed it is the variance. None where no
    resample has a value.

    resamples: float64 [R, S], each row over one draw of the examples; NaN where a number is not
        defined.
    """
    known = resamples[~np.isnan(resamples).any(axis=1)]
    if len(known) < 2:
        return None
    covariance = np.atleast_2d(np.cov(known.T))
    seeds = len(covariance)
    if seeds == 1:
        return float(covariance[0, 0])
    shared = (covariance.sum() - np.trace(covariance)) / (seeds * (seeds - 1))
    return max(0.0, float(shared))


def mean_interval(values: Sequence[float], examples: float | None = None) -> list[float] | None:
    """95% interval of the mean of several seeds' numbers: by Student's t over the seeds, and by the
    normal distribution over the test examples, the reaches added as squares. None where nothing is
    known of either.

    values: one for each seed. examples: see `variance_of_examples`; None where it is not known:
        the interval is over the seeds alone, and too narrow.

    Resampling seeds, as is done with examples, would be too narrow: of three seeds that differ more
    than examples do it takes 19% of equal settings for different (tests/unit/test_seeds.py).
    """
    count = len(values)
    if count < 2 and examples is None:
        return None
    mean, reach = statistics.fmean(values), 0.0
    if count > 1:
        error = statistics.stdev(values) / count**0.5
        reach = float(stdtrit(count - 1, 0.975)) * error
    reach = float(np.hypot(reach, _NORMAL * (examples or 0.0) ** 0.5))
    return [mean - reach, mean + reach]
