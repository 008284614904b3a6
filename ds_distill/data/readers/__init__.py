"""Rows of data files, strict about types: one reader per format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ds_distill.data.readers.base import (
    BATCH,
    AllOrNone,
    Reader,
    check_text,
    kind_of,
    text_of,
    value_of,
    write_names,
    write_rows,
)
from ds_distill.data.readers.conll import Conll, is_conll
from ds_distill.data.readers.tables import HubSplit, Parquet
from ds_distill.data.readers.text import Csv, JsonLines, TextLines, Tsv
from ds_distill.errors import UserError

__all__ = [
    "BATCH",
    "SUFFIXES",
    "AllOrNone",
    "HubSplit",
    "Reader",
    "check_text",
    "file_suffix",
    "kind_of",
    "open_file",
    "text_of",
    "value_of",
    "write_names",
    "write_rows",
]

SUFFIXES = (
    *(".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    *(".parquet", ".txt", ".txt.gz", ".conll", ".conll.gz"),
)


def open_file(path: Path, kept: Path | None = None) -> Reader:
    """The reader of a data file, by its name's ending.

    kept: a folder for what takes reading the whole file, so that it is read once. None: nowhere.

    Raises UserError for other endings, and for empty or unreadable files.
    """
    ending = file_suffix(path)
    if ending is None:
        raise UserError(
            f"{path}: not a kind of data file that is known. Its name must end in "
            f"{', '.join(SUFFIXES)}."
        )
    kinds: dict[str, Callable[[Path], Reader]] = {
        ".jsonl": partial(JsonLines, kept=kept),
        ".json": partial(JsonLines, kept=kept),
        ".csv": Csv,
        ".tsv": _tsv_or_conll,
        ".parquet": Parquet,
        ".txt": TextLines,
        ".conll": Conll,
    }
    return kinds[ending.removesuffix(".gz")](path)


def _tsv_or_conll(path: Path) -> Reader:
    return Conll(path) if is_conll(table := Tsv(path)) else table


def file_suffix(path: Path) -> str | None:
    """The ending of a data file's name (`.jsonl.gz`), or None for other files."""
    endings = [ending for ending in SUFFIXES if path.name.lower().endswith(ending)]
    return max(endings, key=len, default=None)
