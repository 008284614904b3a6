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


# -------------------------------------------------------------------------------- tokens


def tokenise(
    examples: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, file: Path
) -> None:
    """Write the token ids of each example, with special tokens, truncated to `max_length`: the
    columns of `token_features`, to a file that appears complete or not at all."""
    of_words = "words" in examples.column_names
    second = "question" if of_words else "text_b"
    pairs = second in examples.column_names
    fingerprint = tokens_fingerprint(tokenizer)
    views = Views(tokenizer, max_length, pairs=pairs) if of_words else None

    def read(batch: dict[str, list[Any]]) -> Iterable[Mapping[str, Any]]:
        if views is not None:
            asked = WordTokens.of_lists(tokenizer, batch[second]) if pairs else repeat(NO_WORDS)
            return map(views.of_words, WordTokens.of_lists(tokenizer, batch["words"]), asked)
        encoded = tokenizer(
            batch["text"],
            batch["text_b"] if pairs else None,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=pairs,
        )
        return [
            dict(zip(encoded, values, strict=True))
            for values in zip(*encoded.values(), strict=True)
        ]

    def rows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {f"{fingerprint}:{name}": values for name, values in row.items()} for row in read(batch)
        ]

    texts = examples.select_columns(["words" if of_words else "text", *[second] * pairs])
    features = token_features([fingerprint], of_words=of_words, pairs=pairs)
    made_of(texts, rows, features, "tokenises", file, 1000)


class TokenTable:
    """Makes padded views of examples from a memory-mapped file of tokens."""

    def __init__(
        self, file: Path, tokenizer: PreTrainedTokenizerBase, cuts: str | None = None
    ) -> None:
        """file: with the tokenizer's columns of tokens. cuts: the fingerprint of another whose
        tokens are read."""
        begin = f"{cuts or tokens_fingerprint(tokenizer)}:"
        tokens = datasets.Dataset.from_file(str(file))
        names = [name for name in tokens.column_names if name.startswith(begin)]
        tokens = tokens.select_columns(names)
        tokens = tokens.rename_columns({name: name.removeprefix(begin) for name in names})
        self._tokens = tokens.with_format("arrow")
        self._pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self._token_types = "token_type_ids" in tokenizer.model_input_names
        column = tokens.data.column("input_ids")
        self.lengths: np.ndarray = pc.list_value_length(column).to_numpy().astype(np.int32)
        """Tokens of each example: int32 [N]."""
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

    def first_tokens(self, indices: np.ndarray) -> np.ndarray:
        """Of the examples `indices` (int [B]), which are lists of words: the position of each
        word's first token, int64 [n], or NO_TOKEN."""
        return self._of_words("first_tokens", indices)

    def word_tokens(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All tokens of the n words of some examples, int [B]: the number of each one's word, from
        0 to n - 1, and its position in its example. int64 [t] both."""
        counts = self._of_words("token_counts", indices)
        word = np.repeat(np.arange(len(counts)), counts)
        before = np.cumsum(counts) - counts
        return word, self.first_tokens(indices)[word] + np.arange(len(word)) - before[word]

    def _of_words(self, column: str, indices: np.ndarray) -> np.ndarray:
        table = self._tokens[indices if self._chosen is None else self._chosen[indices]]
        numbers = table.column(column).combine_chunks().flatten()
        return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.int64)

    def view(self, indices: np.ndarray) -> PaddedView:
        """The examples `indices` (int [B]) as one padded view."""
        table = self._tokens[indices if self._chosen is None else self._chosen[indices]]
        lengths = self.lengths[indices].astype(np.int64)
        shape = (len(indices), int(lengths.max()))
        filled = np.arange(shape[1])[None, :] < lengths[:, None]
        input_ids = self._pad(table, "input_ids", filled, self._pad_id)
        token_types = None
        if self._token_types:
            stored = "token_type_ids" in table.column_names
            token_types = (
                self._pad(table, "token_type_ids", filled, 0)
                if stored
                else torch.zeros(shape, dtype=torch.int64)
            )
        mask = torch.from_numpy(filled.astype(np.int64))
        return PaddedView(input_ids, mask, token_types, is_full=bool(filled.all()))

    @staticmethod
    def _pad(table: pa.Table, name: str, filled: np.ndarray, pad: int) -> torch.Tensor:
        values = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        padded = np.full(filled.shape, pad, dtype=np.int64)
        padded[filled] = values
        return torch.from_numpy(padded)
