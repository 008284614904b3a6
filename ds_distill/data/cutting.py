"""Tables of examples or their windows, with the tokens that cutting them has made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from ds_distill.data.groups import MARKS
from ds_distill.data.names import TEACHER
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.files import new_file
from ds_distill.process.activity import mark


def token_features(
    fingerprints: Iterable[str], *, of_words: bool, pairs: bool
) -> dict[str, datasets.List]:
    """The columns of a table with some tokenizers' tokens; their names begin with the tokenizer's
    fingerprint: `input_ids`; for pairs `token_type_ids`, which not every model with these tokens
    takes; of lists of words `first_tokens`, the position of each word's first token, and
    `token_counts`, how many it has."""
    kinds = {"input_ids": "int32"}
    kinds |= {"token_type_ids": "int8"} if pairs else {}
    kinds |= dict.fromkeys(("first_tokens", "token_counts"), "int16") if of_words else {}
    return lists_of({f"{one}:{name}": kinds[name] for one in fingerprints for name in kinds})


def lists_of(kinds: Mapping[str, str]) -> dict[str, datasets.List]:
    """Features of columns of lists."""
    return {name: datasets.List(datasets.Value(kind)) for name, kind in kinds.items()}


KEYS = dict.fromkeys(("key_hi", "key_lo"), datasets.Value("int64"))
"""Features of content keys."""


def with_keys(rows: list[dict[str, Any]], keys: np.ndarray) -> list[dict[str, Any]]:
    """Rows with their content keys, int64 [N, 2]."""
    for row, (high, low) in zip(rows, keys.tolist(), strict=True):
        row.update(key_hi=high, key_lo=low)
    return rows


def by_tokens(
    tokenizers: Sequence[PreTrainedTokenizerBase],
) -> dict[str, PreTrainedTokenizerBase]:
    """By fingerprint, of those with the same tokens one."""
    return {tokens_fingerprint(tokenizer): tokenizer for tokenizer in tokenizers}


def of_whole_example(examples: datasets.Dataset) -> dict[str, datasets.Value]:
    """The columns that a window has as its whole example has them, with their types."""
    types = {**dict.fromkeys(MARKS, "int64"), TEACHER: "string"}
    there = {*examples.column_names}
    return {name: datasets.Value(kind) for name, kind in types.items() if name in there}


def made_of(
    examples: datasets.Dataset,
    rows: Callable[[dict[str, list[Any]], Sequence[int]], Sequence[Mapping[str, Any]]],
    features: Mapping[str, Any],
    what: str,
    file: Path | None = None,
    at_once: int = 200,
) -> datasets.Dataset:
    """The rows that are made of examples, of batches of them, given as columns, and their numbers:
    mapped from a file, which appears complete or not at all, or in memory.

    features: of the result; what else rows have is left out. what: is done, for those who wait.
    """
    schema = datasets.Features(features).arrow_schema

    def tables() -> Iterator[pa.Table]:
        for first in range(0, len(examples), at_once):
            numbers = range(first, min(first + at_once, len(examples)))
            mark(what, done=len(numbers))
            made = rows(examples[first : numbers.stop], numbers)
            arrays = [pa.array([row[field.name] for row in made], field.type) for field in schema]
            yield pa.table(arrays, schema=schema)

    if file is not None:
        return _mapped(schema, tables(), file)
    found = pa.concat_tables([schema.empty_table(), *tables()])
    return datasets.Dataset(datasets.table.InMemoryTable(found))


def saved(examples: datasets.Dataset, file: Path) -> datasets.Dataset:
    """The examples as they are, mapped from a file as of `made_of`."""
    tables = examples.with_format("arrow").iter(1000)
    return _mapped(examples.features.arrow_schema, tables, file)


def _mapped(schema: pa.Schema, tables: Iterable[pa.Table], file: Path) -> datasets.Dataset:
    with (
        new_file(file) as path,
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for table in tables:
            writer.write_table(table)
    return datasets.Dataset.from_file(str(file))
