"""Examples cut into windows, with the tokens that cutting them has made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import xxhash

from ds_distill.data.groups import MARKS
from ds_distill.data.teacher_column import TEACHER
from ds_distill.files import new_file

_MARK = ":"
"""In the names of columns of tokens, and in no others."""


def token_columns(fingerprint: str, *, of_words: bool, pairs: bool) -> dict[str, str]:
    """The columns with a tokenizer's tokens, and the dtype of what their lists hold; they are named
    as those of `tokenise`'s file, behind the tokenizer's fingerprint."""
    found = {"input_ids": "int32"}
    found |= {"token_type_ids": "int8"} if pairs else {}
    found |= dict.fromkeys(("first_tokens", "token_counts"), "int16") if of_words else {}
    return {f"{fingerprint}{_MARK}{name}": kind for name, kind in found.items()}


def column_of(name: str) -> str:
    """What a column of tokens holds."""
    return name.split(_MARK)[1]


def lists_of(kinds: Mapping[str, str]) -> dict[str, Any]:
    """Features of columns of lists."""
    return {name: datasets.List(datasets.Value(kind)) for name, kind in kinds.items()}


def of_whole_example(examples: datasets.Dataset) -> dict[str, datasets.Value]:
    """The columns that a window has as its whole example has them, with their types."""
    types = {**dict.fromkeys(MARKS, "int64"), TEACHER: "string"}
    there = {*examples.column_names}
    return {name: datasets.Value(kind) for name, kind in types.items() if name in there}


def cut(
    examples: datasets.Dataset,
    windows: Callable[[dict[str, list[Any]], list[int]], list[dict[str, Any]]],
    features: Mapping[str, Any],
    state: list[Any],
    at_once: int,
) -> datasets.Dataset:
    """A row for each window of each example.

    windows: the rows of some examples, given their columns and their numbers.
    state: all that the rows depend on but the examples, for the fingerprint.
    """

    def columns(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        rows = windows(batch, numbers)
        return {name: [row[name] for row in rows] for name in features}

    return examples.map(
        columns,
        batched=True,
        with_indices=True,
        batch_size=at_once,
        remove_columns=examples.column_names,
        features=datasets.Features(features),
        new_fingerprint=xxhash.xxh3_64_hexdigest(str([*state, examples._fingerprint]).encode()),
    )


def without_tokens(prepared: datasets.Dataset) -> datasets.Dataset:
    """The examples alone."""
    return prepared.select_columns([name for name in prepared.column_names if _MARK not in name])


def write_tokens(prepared: datasets.Dataset, file_of: Callable[[str], Path]) -> None:
    """Write the tokens as `tokenise` would, a file for each tokenizer's fingerprint."""
    columns = [name for name in prepared.column_names if _MARK in name]
    for fingerprint in dict.fromkeys(name.split(_MARK)[0] for name in columns):
        names = {name: column_of(name) for name in columns if name.startswith(fingerprint)}
        table = prepared.select_columns(list(names)).rename_columns(names)
        with (
            new_file(file_of(fingerprint)) as path,
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_stream(sink, table.features.arrow_schema) as writer,
        ):
            for batch in table.with_format("arrow").iter(_AT_ONCE):
                writer.write_table(batch)


_AT_ONCE = 1000
