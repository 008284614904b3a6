"""What a reader is: it gives a file's rows, one Python dict each, with its place for messages. And
formats that know their columns' types: parquet, and splits that `datasets` has loaded."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet

from ds_distill.data.columns import BATCH
from ds_distill.errors import UserError, did_you_mean


class Reader(ABC):
    """The rows of one split."""

    name: str
    """What messages call it: the file's path, or the data set and its split."""
    numbers_are_text = False
    """Whether the format has no numbers, so that `3` may be meant as one."""

    @property
    def read_as(self) -> str | None:
        """How it is read, where the name's ending does not tell."""
        return None

    @abstractmethod
    def columns(self) -> list[str]:
        """Names of the columns. Raises UserError when the file is empty or unreadable."""

    @abstractmethod
    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, row) for each row, where place names the file and line in messages. A row has
        those of `columns` that are there, and may have others.

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


def value_of(row: Mapping[str, Any], name: str, location: str) -> Any:
    """What a row has in a column. Raises UserError for a row without it."""
    if name not in row:
        present = ", ".join(map(repr, row)) or "nothing"
        raise UserError(
            f"no {name!r}; it has {present}.{did_you_mean(name, row)} Every row needs it.",
            at=location,
        )
    return row[name]


def text_of(row: Mapping[str, Any], name: str, location: str) -> str:
    """The text that a row has in a column. Raises UserError for a row without one."""
    text = row.get(name)
    if not (isinstance(text, str) and text.isascii()):  # which nearly all are, and need no check
        check_text(value_of(row, name, location), f"{location}: {name!r}")
    return str(text)


def name_of(row: Mapping[str, Any], column: str, what: str, location: str) -> str | None:
    """The name that a row has in a column, a whole number too; None without one.

    what: the name is of. Raises UserError for what is none.
    """
    value = row.get(column)
    if not (value is None or type(value) in (str, int)):
        raise UserError(
            f"the {what} (column {column!r}) must be a name or a whole number, got "
            f"{kind_of(value)}. Write null where there is none.",
            at=location,
        )
    if value in (None, ""):
        return None
    check_text(str(value), f"{location}: the {what} (column {column!r})")
    return str(value)


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


# ------------------------------------------------------------------------------------------ tables


class Parquet(FileReader):
    """A parquet file; class names that `datasets` wrote into it are used."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._schema = pa.parquet.read_schema(path)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def columns(self) -> list[str]:
        return list(self._schema.names)

    def label_names(self, column: str) -> list[str] | None:
        try:
            features = datasets.Features.from_arrow_schema(self._schema)
        except Exception as error:  # it trusts the metadata
            raise UserError(
                f"{self.path}: its metadata of Hugging Face cannot be read ({type(error).__name__}:"
                f" {str(error)[:200]}). Write the file again, with them or without."
            ) from error
        return _class_names(features, column)

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        present = [name for name in columns if name in self._schema.names]
        for name in present:
            if self._schema.names.count(name) > 1:
                raise UserError(f"{self.path}: has column {name!r} twice. Rename one of them.")
        try:
            with pa.parquet.ParquetFile(self.path) as file:
                yield from _rows(self.name, file.iter_batches(BATCH, columns=present))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UserError:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        return UserError(
            f"{self.path}: not readable as parquet: {reason}. Copy or make the file again."
        )


class HubSplit(Reader):
    """A split of a hub data set that `datasets` has loaded."""

    def __init__(self, data: datasets.Dataset, name: str) -> None:
        self.data = data
        self.name = name

    def columns(self) -> list[str]:
        return list(self.data.column_names)

    def label_names(self, column: str) -> list[str] | None:
        return _class_names(self.data.features, column)

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        present = [name for name in columns if name in self.data.column_names]
        data = self.data.select_columns(present).with_format("arrow")
        yield from _rows(self.name, data.iter(BATCH))

    def fingerprint(self) -> str:
        return str(self.data._fingerprint)


def _class_names(features: datasets.Features, column: str) -> list[str] | None:
    """Of class ids, or of lists of them."""
    feature = features.get(column)
    while isinstance(feature, datasets.List | datasets.LargeList):
        feature = feature.feature
    return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def _rows(
    name: str, tables: Iterable[pa.Table | pa.RecordBatch]
) -> Iterator[tuple[str, dict[str, Any]]]:
    count = 0
    for table in tables:
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, rows {count + 1} to {count + len(table)}: a text is not UTF-8 "
                f"({error.reason}). Write the data again with UTF-8 texts."
            ) from error
        except (ValueError, OverflowError) as error:  # a time that Python has not
            raise UserError(
                f"{name}, rows {count + 1} to {count + len(table)}: cannot be read: {error}. Take "
                "the column out, or write it as text."
            ) from error
        for row in rows:
            count += 1
            yield f"{name}, row {count}", row
