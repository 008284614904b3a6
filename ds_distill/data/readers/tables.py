"""Formats that know their columns' types: parquet, and splits that `datasets` has loaded."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from ds_distill.data.readers.base import BATCH, LONGEST_LINE, FileReader, Reader
from ds_distill.errors import UserError

LARGEST = 1 << 30
"""Bytes, 1 GiB: what a column may have in a row group where that is no more than the file has, but
for its packing."""

MOST_PACKED = 100
"""Times that texts are packed in a file; five is usual, and of texts much alike twenty."""


class Parquet(FileReader):
    """A parquet file; class names that `datasets` wrote into it are used."""

    declares_names = True

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

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        present = [name for name in columns if name in self._schema.names]
        for name in present:
            if self._schema.names.count(name) > 1:
                raise UserError(f"{self.path}: has column {name!r} twice. Rename one of them.")
        with pa.parquet.ParquetFile(self.path) as file:
            for group in range(file.num_row_groups):
                rows = self._at_once(file.metadata.row_group(group), group, set(present))
                for batch in file.iter_batches(rows, [group], present):
                    yield pa.Table.from_batches([batch])

    def _at_once(self, group: Any, number: int, present: Set[str]) -> int:
        """How many rows of a group are read at once: at most BATCH, and so few that their texts
        take some hundred megabytes. Raises UserError where those take more than can be read."""
        rows = BATCH
        for chunk in map(group.column, range(group.num_columns)):
            whole, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
            name = chunk.path_in_schema
            if name.split(".")[0] not in present or chunk.physical_type != "BYTE_ARRAY":
                continue
            if whole > LARGEST and whole > MOST_PACKED * stored:
                raise UserError(
                    f"{self.path}: column {name!r} holds {whole:,} bytes in row group {number}, "
                    f"packed into {stored:,}: more than {MOST_PACKED} times as many, and it is "
                    f"read at once. Write the file again, in row groups of at most {LARGEST:,} "
                    "bytes."
                )
            if chunk.has_dictionary_page and whole * BATCH > LARGEST:
                longest = self._longest(number, name)
                if longest > LONGEST_LINE:
                    raise UserError(
                        f"{self.path}: column {name!r} has a text of {longest:,} bytes in row "
                        f"group {number}, and a text may have {LONGEST_LINE:,}. Take it out, or "
                        "cut it into several."
                    )
                per_row = longest * max(1, chunk.num_values // max(1, group.num_rows))
                rows = min(rows, max(1, LARGEST // 4 // max(1, per_row)))
        return rows

    def _longest(self, group: int, name: str) -> int:
        """The bytes of the longest text that a column's dictionary has: a row that has it is a few
        bits of a file, and in memory the whole text."""
        with pa.parquet.ParquetFile(self.path, read_dictionary=[name]) as file:
            batch = next(file.iter_batches(1, [group], [name]), None)
        values = None if batch is None else batch.column(0)
        while isinstance(values, pa.ListArray | pa.LargeListArray | pa.StructArray):
            values = values.flatten()[0] if isinstance(values, pa.StructArray) else values.flatten()
        if not isinstance(values, pa.DictionaryArray):
            return 0
        return pa.compute.max(pa.compute.binary_length(values.dictionary)).as_py() or 0

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

    declares_names = True

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


def _class_names(features: datasets.Features, column: str) -> list[str] | None:
    """Of class ids, or of lists of them."""
    feature = features.get(column)
    while isinstance(feature, datasets.List | datasets.LargeList):
        feature = feature.feature
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
        except (ValueError, OverflowError) as error:  # a time that Python has not
            raise UserError(
                f"{name}, rows {count + 1} to {count + len(table)}: cannot be read: {error}. Take "
                "the column out, or write it as text."
            ) from error
        for row in rows:
            count += 1
            yield f"{name}, row {count}", row
