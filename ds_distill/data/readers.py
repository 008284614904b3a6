"""Rows of data files, strict about types.

Each reader gives its rows in two ways. `tables` is fast: Arrow, in batches. `rows` is exact:
one Python dict per row with its line number. `examples.py` takes the fast way first and the
exact one only when something is odd, to say what is wrong and where.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from ds_distill.errors import UserError

BATCH = 10_000

SUFFIXES = (
    *(".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    *(".parquet", ".txt", ".txt.gz"),
)


class Reader(ABC):
    """The rows of one split."""

    name: str
    """What messages call it: the file's path, or the data set and its split."""
    numbers_are_text = False
    """Whether the format has no numbers, so that `3` may be meant as one."""

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
        """Names of the class ids in `column`, where the format declares them."""
        return None


class _File(Reader):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
        if size == 0:
            raise UserError(f"{path}: the file is empty (0 bytes). Put at least one row in it.")

    def fingerprint(self) -> str:
        status = self.path.stat()
        return f"{self.path.resolve()} {status.st_size} {status.st_mtime_ns}"

    def _no_rows(self) -> UserError:
        return UserError(f"{self.path}: the file has no rows. Put at least one example in it.")

    def _lines(self) -> Iterator[tuple[int, str]]:
        """(line number, line) of a text file, counted from 1.

        Raises UserError on a damaged gzip file and on a line that is not UTF-8.
        """
        try:
            compressed = self.path.suffix == ".gz"
            with gzip.open(self.path) if compressed else self.path.open("rb") as file:
                for number, raw in enumerate(file, start=1):
                    try:
                        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                    except UnicodeDecodeError as error:
                        raise UserError(
                            f"{self.path}:{number}: not UTF-8: byte {raw[error.start]:#04x} at "
                            f"position {error.start + 1} of the line. Save the file as UTF-8, "
                            f"e.g. with `iconv -f latin1 -t utf-8`."
                        ) from error
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"{self.path}: cannot be read: {error}. Copy or make the file again."
            ) from error


class JsonLines(_File):
    """One JSON object a line, plain or gzip."""

    def columns(self) -> list[str]:
        return list(self._first())

    def _first(self) -> dict[str, Any]:
        for _, row in self.rows([]):
            return row
        raise self._no_rows()

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        first = self._first()
        # A schema instead of Arrow's guess, which turns texts that look like dates into dates.
        fields = [
            (name, pa.int64() if type(first[name]) is int else pa.string())
            for name in columns
            if name in first
        ]
        reader = pyarrow.json.open_json(
            self.path,
            read_options=pyarrow.json.ReadOptions(block_size=1 << 24),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"
            ),
        )
        for batch in reader:
            yield pa.Table.from_batches([batch])

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        wanted = set(columns)

        def refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            row = dict(pairs)
            if len(row) < len(pairs):
                names = [name for name, _ in pairs]
                for name in wanted.intersection(names):
                    if names.count(name) > 1:
                        raise ValueError(f"key {name!r} stands twice")
            return row

        for number, line in self._lines():
            if not line.strip():
                continue
            location = f"{self.path}:{number}"
            try:
                row = json.loads(line, object_pairs_hook=refuse_repeated)
            except (ValueError, RecursionError) as error:
                if number == 1 and line.lstrip().startswith("["):
                    row = []
                else:
                    raise UserError(
                        f"{location}: not readable as JSON: {error}. Each line must be one whole "
                        'object, e.g. {"text": "...", "label": "..."}.'
                    ) from error
            if not isinstance(row, dict):
                kind = "an array" if isinstance(row, list) else kind_of(row)
                raise UserError(
                    f"{location}: holds {kind}, not an object. Write one object per line, e.g. "
                    '{"text": "...", "label": "..."}; `jq -c .[]` turns an array into lines.'
                )
            yield location, row


class TextLines(_File):
    """One text a line, plain or gzip: the column `text`. Blank lines are left out, and white
    space around a text."""

    def columns(self) -> list[str]:
        return ["text"]

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        # The exact way is fast enough: there is nothing to parse.
        rows = self.rows(columns)
        while batch := [row for _, row in islice(rows, BATCH)]:
            yield pa.Table.from_pylist(batch, pa.schema([("text", pa.string())]))

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, line in self._lines():
            if text := line.strip():
                yield f"{self.path}:{number}", {"text": text}


class Csv(_File):
    """Comma-separated values with a header, plain or gzip; all values are text."""

    numbers_are_text = True
    delimiter = ","
    quoted = True
    advice = (
        "Put a text that holds commas, quotes or line breaks in double quotes, and double each "
        "quote inside."
    )

    def columns(self) -> list[str]:
        for _, names in self._records():
            return names
        raise self._no_rows()

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        header = self.columns()
        present = [name for name in columns if name in header]
        if any(header.count(name) > 1 for name in present):
            raise ValueError("repeated column")
        reader = pyarrow.csv.open_csv(
            self.path,
            read_options=pyarrow.csv.ReadOptions(block_size=1 << 24),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char='"' if self.quoted else False,
                newlines_in_values=self.quoted,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=present,
                column_types=dict.fromkeys(present, pa.string()),
                strings_can_be_null=False,
            ),
        )
        for batch in reader:
            yield pa.Table.from_batches([batch])

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        header: list[str] | None = None
        for number, record in self._records():
            location = f"{self.path}:{number}"
            if header is None:
                header = record
                for name in columns:
                    if header.count(name) > 1:
                        raise UserError(
                            f"{location}: the header has column {name!r} twice. Rename one of them."
                        )
            elif len(record) != len(header):
                raise UserError(
                    f"{location}: the row has {len(record)} values and the header {len(header)}. "
                    f"{self.advice}"
                )
            else:
                yield location, dict(zip(header, record, strict=True))

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """(line number, values) of the records, the header first; empty lines left out."""
        number = 0
        lines = self._lines()

        def text() -> Iterator[str]:
            nonlocal number
            for number, line in lines:  # noqa: B007
                yield line

        limit = csv.field_size_limit(2**31 - 1)  # its default of 128 KiB is short for a text
        start = 1
        try:
            for record in csv.reader(
                text(),
                strict=True,
                delimiter=self.delimiter,
                quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            ):
                if record:
                    yield start, record
                start = number + 1
        except csv.Error as error:
            raise UserError(
                f"{self.path}:{start}: not readable as separated values: {error}. {self.advice}"
            ) from error
        finally:
            csv.field_size_limit(limit)


class Tsv(Csv):
    """Tab-separated values with a header, plain or gzip: one row a line, and a quote is a letter
    like others (the media type text/tab-separated-values), so that no lone quote joins rows."""

    delimiter = "\t"
    quoted = False
    advice = "Take tabs and line breaks out of the texts; quotes do not hide them here."


class Parquet(_File):
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
        return _class_names(datasets.Features.from_arrow_schema(self._schema), column)

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        present = [name for name in columns if name in self._schema.names]
        with pa.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=BATCH, columns=present):
                yield pa.Table.from_batches([batch])

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            yield from _table_rows(self.name, self.tables(columns))
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

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        present = [name for name in columns if name in self.data.column_names]
        yield from self.data.select_columns(present).with_format("arrow").iter(BATCH)

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from _table_rows(self.name, self.tables(columns))

    def fingerprint(self) -> str:
        return str(self.data._fingerprint)


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
    kinds: dict[str, Callable[[Path], Reader]] = {
        ".jsonl": JsonLines,
        ".json": JsonLines,
        ".csv": Csv,
        ".tsv": Tsv,
        ".parquet": Parquet,
        ".txt": TextLines,
    }
    return kinds[ending.removesuffix(".gz")](path)


def file_suffix(path: Path) -> str | None:
    """The ending of a data file's name (`.jsonl.gz`), or None for other files."""
    endings = [ending for ending in SUFFIXES if path.name.lower().endswith(ending)]
    return max(endings, key=len, default=None)


def nearest(value: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` for a message, or nothing."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(value.lower(), by_lower, n=1)
    return f" Did you mean `{by_lower[close[0]]}`?" if close else ""


def _class_names(features: datasets.Features, column: str) -> list[str] | None:
    feature = features.get(column)
    return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def _table_rows(name: str, tables: Iterator[pa.Table]) -> Iterator[tuple[str, dict[str, Any]]]:
    count = 0
    for table in tables:
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, rows {count + 1} to {count + len(table)}: a text is not UTF-8 "
                f"({error.reason}). Write the data again with UTF-8 texts."
            ) from error
        for row in rows:
            count += 1
            yield f"{name}, row {count}", row


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
