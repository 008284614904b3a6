"""Rows of data files, strict about types: one reader per format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_distill.data.readers.base import HubSplit, Parquet, Reader
from ds_distill.data.readers.text import Conll, Csv, JsonLines, TextLines, Tsv, is_conll
from ds_distill.errors import UserError

__all__ = ["SUFFIXES", "HubSplit", "Reader", "file_suffix", "open_file"]

_KINDS: dict[str, Callable[[Path], Reader]] = {
    ".jsonl": JsonLines,
    ".json": JsonLines,
    ".csv": Csv,
    ".tsv": Tsv,
    ".parquet": Parquet,
    ".txt": TextLines,
    ".conll": Conll,
}
SUFFIXES = (
    *(".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    *(".parquet", ".txt", ".txt.gz", ".conll", ".conll.gz"),
)


def open_file(path: Path) -> Reader:
    """The reader of a data file, by its name's ending.

    Raises UserError for other endings, and for empty or unreadable files.
    """
    ending = file_suffix(path)
    if ending is None:
        raise UserError(
            f"{path}: not a kind of data file that is known. Its name must end in "
            f"{', '.join(SUFFIXES)}."
        )
    reader = _KINDS[ending.removesuffix(".gz")](path)
    return Conll(path) if isinstance(reader, Tsv) and is_conll(reader) else reader


def file_suffix(path: Path) -> str | None:
    """The ending of a data file's name (`.jsonl.gz`), or None for other files."""
    endings = [ending for ending in SUFFIXES if path.name.lower().endswith(ending)]
    return max(endings, key=len, default=None)
