"""Intervals as sentences and tables show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_distill.recipe.metrics.metric import no_width


def interval_as(form: Callable[[float], str], interval: Sequence[float]) -> str:
    """`LOW to HIGH`; of no width, see `no_width`, that it is not known."""
    low, high = interval
    if no_width(interval):
        return "not known: every resample gives the same"
    return f"{form(low)} to {form(high)}"
