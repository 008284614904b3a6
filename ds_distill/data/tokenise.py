"""Tokenise examples once per tokenizer, into token tables on disk, memory-mapped by `datasets`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.data.word_tokens import NO_WORDS, Views, WordTokens
from ds_distill.files import new_file
from ds_distill.process.activity import mark
from ds_distill.views import PaddedView

VERSION = 2
"""Part of the files' names: raise it when the same examples give others."""

_TOKENS = {
    "input_ids": "int32",
    "token_type_ids": "int8",
    "places": "int16",
    "token_counts": "int16",
    "candidates": "int16",
}


def token_features(fingerprints: Iterable[str], *names: str) -> dict[str, datasets.List]:
    """The columns of a table with some tokenizers' tokens; their names begin with the tokenizer's
    fingerprint: `input_ids`; for pairs `token_type_ids`, which not every model with these tokens
    takes; of lists of words `places`, the position of each word's first token or NO_TOKEN, and
    `token_counts`, how many it has; of questions `candidates`, see `PaddedView`. Where neither
    places nor candidates are, a unit is read whole."""
    return lists_of({f"{one}:{name}": _TOKENS[name] for one in fingerprints for name in names})


def of_tokenizers(
    fingerprints: Iterable[str], tokens: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """A unit's values in these columns, given those of each tokenizer."""
    return {
        f"{fingerprint}:{name}": values
        for fingerprint, of_one in zip(fingerprints, tokens, strict=True)
        for name, values in of_one.items()
    }


def lists_of(kinds: Mapping[str, str]) -> dict[str, datasets.List]:
    """Features of columns of lists."""
    return {name: datasets.List(datasets.Value(kind)) for name, kind in kinds.items()}


def by_tokens(
    tokenizers: Sequence[PreTrainedTokenizerBase],
) -> dict[str, PreTrainedTokenizerBase]:
    """By fingerprint, of those with the same tokens one."""
    return {tokens_fingerprint(tokenizer): tokenizer for tokenizer in tokenizers}


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

    if file is None:
        found = pa.concat_tables([schema.empty_table(), *tables()])
        return datasets.Dataset(datasets.table.InMemoryTable(found))
    with (
        new_file(file) as path,
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for table in tables():
            writer.write_table(table)
    return datasets.Dataset.from_file(str(file))


# -------------------------------------------------------------------------------- tokens


def tokenise(
    examples: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """The tokens of each text, pair, or list of words, with special ones, truncated to
    `max_length`: the columns of `token_features`, in a file that appears complete or not at all,
    or in memory."""
    of_words = "words" in examples.column_names
    second = "question" if of_words else "text_b"
    pairs, fingerprint = second in examples.column_names, tokens_fingerprint(tokenizer)
    view = Views(tokenizer, max_length, pairs=pairs).of_words if of_words else None

    def read(batch: dict[str, list[Any]]) -> Iterable[Mapping[str, Any]]:
        if view is not None:
            asked = WordTokens.of_lists(tokenizer, batch[second]) if pairs else repeat(NO_WORDS)
            return map(view, WordTokens.of_lists(tokenizer, batch["words"]), asked)
        encoded = tokenizer(
            batch["text"],
            batch["text_b"] if pairs else None,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=pairs,
        )
        rows = zip(*encoded.values(), strict=True)
        return (dict(zip(encoded, values, strict=True)) for values in rows)

    def rows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [of_tokenizers([fingerprint], [row]) for row in read(batch)]

    texts = examples.select_columns(["words" if of_words else "text", *[second] * pairs])
    names = (*["token_type_ids"] * pairs, *["places", "token_counts"] * of_words)
    features = token_features([fingerprint], "input_ids", *names)
    return made_of(texts, rows, features, "tokenises", file, 1000)


class TokenTable:
    """Makes padded views of units from a table of their tokens."""

    def __init__(
        self,
        tokens: datasets.Dataset,
        tokenizer: PreTrainedTokenizerBase,
        cuts: str | None = None,
    ) -> None:
        """tokens: has the tokenizer's columns of tokens; see `token_features`. cuts: the
        fingerprint of another whose tokens are read."""
        begin = f"{cuts or tokens_fingerprint(tokenizer)}:"
        names = [name for name in tokens.column_names if name.startswith(begin)]
        tokens = tokens.select_columns(names)
        tokens = tokens.rename_columns({name: name.removeprefix(begin) for name in names})
        self._tokens = tokens.with_format("arrow")
        self._columns = frozenset(tokens.column_names)
        self._pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self._token_types = "token_type_ids" in tokenizer.model_input_names
        column = tokens.data.column("input_ids")
        self.lengths: np.ndarray = pc.list_value_length(column).to_numpy().astype(np.int32)
        """Tokens of each unit: int32 [N]."""
        self._chosen: np.ndarray | None = None

    def at(self, indices: np.ndarray) -> TokenTable:
        """The table of some examples, renumbered from 0; the file stays shared."""
        part = copy.copy(self)
        part.lengths = self.lengths[indices]
        part._chosen = indices if self._chosen is None else self._chosen[indices]
        return part

    def counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs in the whole file, with special tokens: int64 [V]."""
        total = np.zeros(vocabulary, dtype=np.int64)
        for chunk in self._tokens.data.column("input_ids").chunks:
            total += np.bincount(chunk.flatten().to_numpy(), minlength=vocabulary)
        return total

    def token_counts(self, indices: np.ndarray) -> np.ndarray:
        """How many tokens each word of some units has, int [B]: int64 [n]."""
        return _flat(self._rows(indices), "token_counts").astype(np.int64)

    def view(self, indices: np.ndarray) -> PaddedView:
        """The units `indices` (int [B]) as one padded view, with the places of their rows."""
        table = self._rows(indices)
        lengths = self.lengths[indices].astype(np.int64)
        shape = (len(indices), int(lengths.max()))
        filled = np.arange(shape[1])[None, :] < lengths[:, None]
        token_types = positions = candidates = None
        if self._token_types and "token_type_ids" in self._columns:
            token_types = _padded(table, "token_type_ids", filled, 0)
        elif self._token_types:
            token_types = torch.zeros(shape, dtype=torch.int64)
        if "places" in self._columns:
            of_row = np.repeat(np.arange(len(indices)), _counts(table, "places"))
            places = _flat(table, "places").clip(min=0)
            positions = torch.from_numpy(of_row * shape[1] + places)
        if "candidates" in self._columns:
            counts = _counts(table, "candidates")
            here = np.arange(counts.max())[None, :] < counts[:, None]
            candidates = _padded(table, "candidates", here, -1)
        return PaddedView(
            _padded(table, "input_ids", filled, self._pad_id),
            torch.from_numpy(filled.astype(np.int64)),
            token_types,
            positions,
            candidates,
            is_full=bool(filled.all()),
        )

    def _rows(self, indices: np.ndarray) -> pa.Table:
        found: pa.Table = self._tokens[indices if self._chosen is None else self._chosen[indices]]
        return found


def _flat(table: pa.Table, name: str) -> np.ndarray:
    """The values of a column of lists, one list's after the other's."""
    flat = table.column(name).combine_chunks().flatten()
    return np.asarray(flat.to_numpy(zero_copy_only=False))


def _counts(table: pa.Table, name: str) -> np.ndarray:
    """How many values each list has."""
    return np.asarray(pc.list_value_length(table.column(name)).to_numpy())


def _padded(table: pa.Table, name: str, filled: np.ndarray, pad: int) -> torch.Tensor:
    padded = np.full(filled.shape, pad, dtype=np.int64)
    padded[filled] = _flat(table, name)
    return torch.from_numpy(padded)
