"""Tokenise examples once per tokenizer, into token tables on disk, memory-mapped by `datasets`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.cutting import made_of, token_features
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.data.word_tokens import NO_WORDS, Views, WordTokens
from ds_distill.views import PaddedView


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
