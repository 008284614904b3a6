"""Files of figures that commands draw."""

from __future__ import annotations

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


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure; the same figure gives the same file."""
    kind = check_figure(path)
    with new_file(path) as aside:
        figure.savefig(aside, format=kind, metadata={"Date": None} if kind == "svg" else None)
