"""Tokenise examples once per tokenizer, into token tables on disk, memory-mapped by `datasets`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.word_tokens import WordTokens, WordViews
from ds_distill.files import publish_file
from ds_distill.process.activity import mark
from ds_distill.views import PaddedView


def tokenise(
    examples: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, file: Path
) -> None:
    """Write the token ids of each example, with special tokens, truncated to `max_length`.

    The Arrow file `file` appears complete or not at all. It has `input_ids` (list of int32)
    and, for pairs, `token_type_ids` (list of int8), which not every model with these tokens takes;
    of lists of words `first_tokens` (list of int16), the position of each word's first token, and
    `token_counts` (list of int16), how many it has.
    """
    of_words = "words" in examples.column_names
    pairs = ("question" if of_words else "text_b") in examples.column_names
    features = {"input_ids": datasets.List(datasets.Value("int32"))}
    if pairs:
        features["token_type_ids"] = datasets.List(datasets.Value("int8"))
    if of_words:
        names = ("first_tokens", "token_counts")
        features |= dict.fromkeys(names, datasets.List(datasets.Value("int16")))
        return _write(examples, partial(_of_words, tokenizer, max_length, features), features, file)

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        mark("tokenises", done=len(rows["text"]))
        encoded = tokenizer(
            rows["text"],
            rows["text_b"] if pairs else None,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=pairs,
        )
        return {name: encoded[name] for name in features}

    _write(examples, encode, features, file)


def _of_words(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    names: Collection[str],
    rows: dict[str, list[list[str]]],
) -> dict[str, Any]:
    mark("tokenises", done=len(rows["words"]))
    words = WordTokens.of_lists(tokenizer, rows["words"])
    asked: list[WordTokens | None] = [None] * len(words)
    if "question" in rows:
        asked = [*WordTokens.of_lists(tokenizer, rows["question"])]
    views = WordViews(tokenizer, max_length, pairs="question" in rows)
    found = [views.view(*of_one) for of_one in zip(words, asked, strict=True)]
    return {name: [getattr(view, name) for view in found] for name in names}


def _write(
    examples: datasets.Dataset,
    encode: Callable[[dict[str, list[Any]]], dict[str, Any]],
    features: dict[str, Any],
    file: Path,
) -> None:
    """Write what `encode` makes of batches of examples."""
    # In its own folder, because `datasets` puts temporary files beside the one it writes.
    temporary = file.with_name(f".{file.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        examples.map(
            encode,
            batched=True,
            remove_columns=examples.column_names,
            features=datasets.Features(features),
            cache_file_name=str(temporary / file.name),
            load_from_cache_file=False,
            new_fingerprint=file.stem,  # else it pickles the tokenizer for one: a second each
        )
        publish_file(temporary / file.name, file)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class TokenTable:
    """Makes padded views of examples from a memory-mapped file of tokens."""

    def __init__(self, file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """file: as `tokenise` wrote it."""
        tokens = datasets.Dataset.from_file(str(file))
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
