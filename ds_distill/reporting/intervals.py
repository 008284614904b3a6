"""Intervals as sentences and tables show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def interval_as(form: Callable[[float], str], interval: Sequence[float]) -> str:
    """`LOW to HIGH`. A width of zero is no certainty: it says that no draw of these examples or
    seeds is another, as of predictions that are all alike."""
    low, high = interval
    if no_width(interval):
        return "not known: every resample gives the same"
    return f"{form(low)} to {form(high)}"


def no_width(interval: Sequence[float]) -> bool:
    """Whether the bounds are the same number, up to rounding."""
    low, high = interval
    return high - low < 1e-12
