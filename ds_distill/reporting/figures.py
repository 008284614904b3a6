"""Figures that commands draw, as files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


_NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}
"""By the file's kind: no time in its metadata."""

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


@contextmanager
def new_figure(path: Path, size: tuple[float, float], panels: int = 1) -> Iterator[list[Any]]:
    """A matplotlib figure's axes, one for each panel, side by side. What is drawn in this block is
    in `path` after it; the same gives the same file. Raises UserError for a name of another kind.

    size: inches.
    """
    kind = check_figure(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=size, squeeze=False, layout="constrained")
    try:
        yield [*axes[0]]
        salt = {"svg.hashsalt": "ds_distill"}  # else ids are random
        with matplotlib.rc_context(salt), new_file(path) as aside:
            figure.savefig(aside, format=kind, metadata=_NO_DATE[kind])
    finally:
        pyplot.close(figure)
