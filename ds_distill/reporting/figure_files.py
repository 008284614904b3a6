"""Files of figures that commands draw."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds_distill.errors import UserError
from ds_distill.files import new_file


def check_figure(path: Path) -> str:
    """The format that a file's name says. Raises UserError for another than svg, png and pdf."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("svg", "png", "pdf"):
        raise UserError(f"--figure {path}: name a file that ends in .svg, .png or .pdf.")
    return kind


LEAST_POINTS = 10.0
"""Of an axis of per cent: models that are level are to look level."""
LEAST_SHARE = 0.1
"""Of the largest value, for axes of other metrics."""


def of_scores(scores: Iterable[float], *, in_percent: bool) -> tuple[float, float]:
    """The limits of an axis of scores: none lies on the frame, and the axis is not so short that
    small differences look large.

    scores: one or more. in_percent: whether they are, from 0 to 100.
    """
    low, high = min(scores := [*scores]), max(scores)
    least = LEAST_POINTS if in_percent else LEAST_SHARE * max(abs(low), abs(high)) or 1.0
    span = max(1.3 * (high - low), least)
    middle = (low + high) / 2
    return middle - span / 2, middle + span / 2


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure; the same figure gives the same file."""
    kind = check_figure(path)
    with new_file(path) as aside:
        figure.savefig(aside, format=kind, metadata={"Date": None} if kind == "svg" else None)
