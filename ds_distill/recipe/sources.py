"""The sources of data, by what a recipe's `task.data.path` looks like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_distill.recipe.part import Implemented

DOCSTRINGS = "docstrings:"
"""What a path of docstrings begins with."""

SOURCES: dict[str, type[DataSource]] = {}


class DataSource(Implemented):
    """Where examples come from. It runs a function (task, cache_folder, progress) ->
    `ds_distill.data.sources.Source`."""

    kind_of_part = "source"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        SOURCES[cls.part_name] = cls

    @classmethod
    def recognises(cls, path: str) -> bool:
        """Whether a recipe's `data.path` is of this source."""
        return False


class Docstrings(DataSource):
    part_name, runs = "docstrings", "ds_distill.data.docstrings:DocstringSource"

    @classmethod
    def recognises(cls, path: str) -> bool:
        return path.startswith(DOCSTRINGS)


class Files(DataSource):
    part_name, runs = "files", "ds_distill.data.sources:open_files"

    @classmethod
    def recognises(cls, path: str) -> bool:
        file = Path(path).expanduser()
        return os.path.isdir(file) or os.path.isfile(file)  # False of a name no file can have


class Hub(DataSource):
    """What no other source recognises."""

    part_name, runs = "hub", "ds_distill.data.sources:open_hub"


def source_of(path: str) -> type[DataSource]:
    """The source that a recipe's `task.data.path` is of."""
    return next((source for source in SOURCES.values() if source.recognises(path)), Hub)
