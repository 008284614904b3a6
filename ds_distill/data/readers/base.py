"""What a reader is. It gives its rows in two ways.

`tables` is fast: Arrow, in batches. `rows` is exact: one Python dict per row with its line
number. `examples.py` takes the fast way first and the exact one only when something is odd, to
say what is wrong and where.
"""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from ds_distill.errors import UserError
from ds_distill.process.activity import mark

BATCH = 10_000

LONGEST_LINE = 1 << 24
"""Bytes, 16 MiB: what is read at once. A gzip file of kilobytes may hold a line of gigabytes."""


class Reader(ABC):
    """The rows of one split."""

    name: str
    """What messages call it: the file's path, or the data set and its split."""
    numbers_are_text = False
    """Whether the format has no numbers, so that `3` may be meant as one."""
    declares_names = False
    """Whether the format can have names of class ids; see `label_names`."""

    @abstractmethod
    def columns(self) -> list[str]:
        """Names of the columns. Raises UserError when the file is empty or unreadable."""

    @abstractmethod
    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        """Batches with those of `columns` that are there.

        Raises pyarrow.ArrowException, OSError or ValueError on anything odd.
        """

    @abstractmethod
    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, row) for each row, where place names the file and line in messages.

        Raises UserError on a row that cannot be read.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the rows do."""

    def label_names(self, column: str) -> list[str] | None:
        """Names of the class ids in `column`, or of those in its lists, where they are declared."""
        return None


class FileReader(Reader):
    """The rows of one file. Raises UserError when it is empty or unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
        if not stat.S_ISREG(status.st_mode):  # a pipe may have no end, and is read only once
            raise UserError(f"{path}: is no regular file. Write the data into one.")
        if status.st_size == 0:
            raise UserError(f"{path}: the file is empty (0 bytes). Put at least one row in it.")

    def fingerprint(self) -> str:
        status = self.path.stat()
        return f"{self.path.resolve()} {status.st_size} {status.st_mtime_ns}"

    def no_rows(self) -> UserError:
        """The file holds nothing but a header, or blank lines."""
        return UserError(f"{self.path}: the file has no rows. Put at least one example in it.")


def kind_of(value: object) -> str:
    """What a JSON or Arrow value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return f"{str(value)[:40]!r} ({type(value).__name__})"


def write_names(
    reader: Reader,
    column: str,
    what: str,
    path: Path,
    schema: pa.Schema,
    arrays: Callable[[list[str | None]], list[pa.Array]],
) -> None:
    """Write the names in a column of a reader's rows to an Arrow stream file.

    what: the names are of. arrays: the file's columns, of some rows' names; None of a row that has
        none.

    Raises UserError with the location of a row that has something else there.
    """
    names = _names_in(reader, column, what)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(names, BATCH)):
            mark(f"reads each example's {what}")
            writer.write_batch(pa.RecordBatch.from_arrays(arrays(batch), schema=schema))


def _names_in(reader: Reader, column: str, what: str) -> Iterator[str | None]:
    for location, row in reader.rows([column]):
        value = row.get(column)
        if not (value is None or type(value) in (str, int)):
            raise UserError(
                f"{location}: the {what} (column {column!r}) must be a name or a whole number, got "
                f"{kind_of(value)}. Write null where there is none."
            )
        name = None if value in (None, "") else str(value)
        if name is not None:
            check_text(name, f"{location}: the {what} (column {column!r})")
        yield name


def check_text(text: object, what: str) -> None:
    """Raises UserError for what is no text that can be encoded. what: it is, at the start of a
    message."""
    if not isinstance(text, str):
        raise UserError(f"{what} must be a text, got {kind_of(text)}. Write it in quotes.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} holds half of a surrogate pair ({text[error.start]!r}), which is no "
            "character. Correct it or take the row out."
        ) from error
