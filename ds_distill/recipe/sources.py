"""The sources of data, by what a recipe's `task.data.path` looks like."""

from __future__ import annotations

import os
from pathlib import Path

from ds_distill.recipe.entry import SourceEntry
from ds_distill.recipe.entry_points import load_entry_points

DOCSTRINGS = "docstrings:"
"""What a path of docstrings begins with."""

SOURCES: dict[str, SourceEntry] = {
    entry.name: entry
    for entry in (
        SourceEntry(
            name="docstrings",
            implementation="ds_distill.data.docstring_source:DocstringSource",
            recognises=lambda path: path.startswith(DOCSTRINGS),
        ),
        SourceEntry(
            name="files",
            implementation="ds_distill.data.sources:open_files",
            recognises=lambda path: _is_local(Path(path).expanduser()),
        ),
        SourceEntry(name="hub", implementation="ds_distill.data.sources:open_hub"),
    )
}


def _is_local(path: Path) -> bool:
    return os.path.isdir(path) or os.path.isfile(path)  # False of a name that no file can have


def source_of(path: str) -> SourceEntry:
    """The source that a recipe's `task.data.path` is of."""
    load_entry_points()
    return next(
        (entry for entry in SOURCES.values() if entry.recognises and entry.recognises(path)),
        SOURCES["hub"],
    )
