"""Figures of studies, as files."""

from __future__ import annotations

from collections.abc import Iterator
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
