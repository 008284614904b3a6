"""Formats that know their columns' types: parquet, and splits that `datasets` has loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet

from ds_distill.data.columns import BATCH
from ds_distill.data.readers.base import FileReader, Reader
from ds_distill.errors import UserError


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
