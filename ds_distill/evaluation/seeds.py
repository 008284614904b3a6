"""Numbers of several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scipy.special import stdtrit


def t_interval(values: Sequence[float]) -> list[float] | None:
    """95% interval of the mean, by Student's t; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / count**0.5
    reach = float(stdtrit(count - 1, 0.975)) * error
    return [mean - reach, mean + reach]
