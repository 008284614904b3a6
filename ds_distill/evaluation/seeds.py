"""Numbers of several seeds on the same test examples, and what chance adds to their mean."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

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
