"""Examples that are lists of words: where each word's token stands in a model's view."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ds_distill.data.keys import content_keys
from ds_distill.data.labels import LabelIds
from ds_distill.data.readers import BATCH, Reader, kind_of
from ds_distill.errors import UserError, did_you_mean
from ds_distill.parts.data import Columns
from ds_distill.progress import mark

EXAMPLES = pa.schema(
    [
        ("words", pa.list_(pa.string())),
        ("label", pa.list_(pa.int16())),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
    ]
)
"""Columns of converted examples: words, and the class id of each one's tag, -1 where the split has
no tags."""

NO_TOKEN = -1
"""The position of a word that has no token in a view: the tokenizer drops it, or it is cut off."""

_AT_ONCE = 1000


@dataclass(frozen=True)
class Words:
    """The words of N examples, R in all, one example's after the other's."""

    offsets: np.ndarray
    """int64 [N + 1]: the first word of each example, and R."""
    counted: np.ndarray
    """bool [R]: whether a word has a token in the view of every model of the recipe. Others are
    rows of no loss, and count as O in every score."""

    @staticmethod
    def of(split: datasets.Dataset) -> Words:
        """Of a prepared split; see `prepare`."""
        counted = split.with_format("arrow")["counted"][:]
        lists = pa.chunked_array(counted) if not isinstance(counted, pa.ChunkedArray) else counted
        lengths = np.concatenate([_lengths(chunk) for chunk in lists.chunks])
        flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in lists.chunks]
        return Words(np.concatenate([[0], np.cumsum(lengths)]), np.concatenate(flat))

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def examples(self) -> np.ndarray:
        """int64 [R]: the example of each word."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def of_examples(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the words of some examples, int [B], in their order: int64 [n]."""
        lengths = np.diff(self.offsets)[indices]
        ends = np.cumsum(lengths)
        firsts = np.repeat(self.offsets[indices] - (ends - lengths), lengths)
        return firsts + np.arange(ends[-1] if len(ends) else 0)

    def at(self, indices: np.ndarray) -> Words:
        """Those of some examples."""
        lengths = np.diff(self.offsets)[indices]
        return Words(
            np.concatenate([[0], np.cumsum(lengths)]), self.counted[self.of_examples(indices)]
        )


def word_keys(examples: Sequence[Sequence[str]]) -> np.ndarray:
    """Content keys of lists of words: int64 [N, 2]. Lists that differ have keys that differ, also
    where the words are the same letters cut elsewhere."""
    return content_keys([json.dumps(list(words), ensure_ascii=False) for words in examples])


def convert(reader: Reader, columns: Columns, labels: list[str], path: Path) -> None:
    """Write a reader's rows as examples to an Arrow stream file; see `EXAMPLES`.

    labels: the tags, in the order of the class ids; none where the split has none.

    Raises UserError with the location of the first invalid row.
    """
    count = 0
    rows = _checked(reader, columns, labels)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, EXAMPLES) as writer:
        while batch := list(islice(rows, BATCH)):
            mark("reads data")
            words, tags = [list(column) for column in zip(*batch, strict=True)]
            keys = word_keys(words)
            arrays = [pa.array(words, pa.list_(pa.string())), pa.array(tags, pa.list_(pa.int16()))]
            arrays += [pa.array(keys[:, 0]), pa.array(keys[:, 1])]
            writer.write_batch(pa.record_batch(arrays, schema=EXAMPLES))
            count += len(batch)
    if count == 0:
        raise UserError(f"{reader.name}: no rows. Put at least one example there.")


def _checked(
    reader: Reader, columns: Columns, labels: list[str]
) -> Iterator[tuple[list[str], list[int]]]:
    """Words and class ids of each row."""
    ids = LabelIds(labels, reader, columns.tags) if labels else None
    first: dict[bool, str] = {}  # has tags or not -> location of the first such row
    names = [columns.tokens, columns.tags] if ids else [columns.tokens]
    for location, row in reader.rows(names):
        words = _words(row, columns.tokens, location)
        tags = [-1] * len(words)
        given = row.get(columns.tags) if ids else None
        if ids is not None and given is not None:
            tags = _tags(given, words, columns, ids, location)
        first.setdefault(given is not None, location)
        if len(first) > 1:
            raise UserError(
                f"{first[False]}: no tags in {columns.tags!r}, but {first[True]} has some. Give "
                "every row of a split tags, or none."
            )
        yield words, tags


def _words(row: dict[str, Any], name: str, location: str) -> list[str]:
    if name not in row:
        present = ", ".join(map(repr, row)) or "nothing"
        raise UserError(
            f"{location}: no {name!r}; it has {present}.{did_you_mean(name, row)} Every row needs "
            "it."
        )
    words = row[name]
    if not isinstance(words, list) or not words:
        raise UserError(
            f"{location}: {name!r} must be a list of words, at least one, got "
            f"{'an empty list' if words == [] else kind_of(words)}. Write the words as a list of "
            "texts, or take the row out."
        )
    for number, word in enumerate(words):
        if not isinstance(word, str):
            raise UserError(
                f"{location}: word {number} of {name!r} must be a text, got {kind_of(word)}. Write "
                "it in quotes."
            )
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{location}: word {number} of {name!r} holds half of a surrogate pair "
                f"({word[error.start]!r}), which is no character. Correct it or take the row out."
            ) from error
    return words


def _tags(
    given: Any, words: list[str], columns: Columns, ids: LabelIds, location: str
) -> list[int]:
    if not isinstance(given, list) or len(given) != len(words):
        found = f"{len(given)} of them" if isinstance(given, list) else kind_of(given)
        raise UserError(
            f"{location}: {columns.tags!r} must be a list of one tag for each of the "
            f"{len(words)} words in {columns.tokens!r}, got {found}. Correct the row or take it "
            "out."
        )
    tags = [ids.of_value(tag, location) for tag in given]
    if min(tags) < 0:
        raise UserError(
            f"{location}: word {tags.index(-1)} has no tag in {columns.tags!r}. Give each word of "
            "a row a tag, or write null in place of the whole list."
        )
    return tags


def encode_words(
    tokenizer: PreTrainedTokenizerBase, examples: list[list[str]], max_length: int
) -> BatchEncoding:
    """The tokens of lists of words, with special tokens, truncated."""
    return tokenizer(
        examples,
        is_split_into_words=True,
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )


def first_tokens(encoded: BatchEncoding, number: int, words: int) -> np.ndarray:
    """The position of the first token of each word of an example: int16 [words], NO_TOKEN of those
    that have none.

    number: the example's, in `encoded`.
    """
    found = np.full(words, NO_TOKEN, dtype=np.int16)
    of_token = encoded.word_ids(number)
    for position in range(len(of_token) - 1, -1, -1):  # the first one is written last
        word = of_token[position]
        if word is not None:
            found[word] = position
    return found


def prepare(
    examples: datasets.Dataset, tokenizers: list[PreTrainedTokenizerBase], max_length: int
) -> datasets.Dataset:
    """Examples with a column `counted`, list of bool: of each word whether it has a token in the
    view of every model. Teachers and student meet on these words, whatever their tokenizers are."""

    def count(rows: dict[str, list[list[str]]]) -> dict[str, list[list[bool]]]:
        mark("finds the words that all models have")
        all_words = rows["words"]
        have = [np.ones(len(words), dtype=bool) for words in all_words]
        for tokenizer in tokenizers:
            encoded = encode_words(tokenizer, all_words, max_length)
            for number, here in enumerate(have):
                here &= first_tokens(encoded, number, len(here)) != NO_TOKEN
        return {"counted": [here.tolist() for here in have]}

    features = datasets.Features(
        {**examples.features, "counted": datasets.List(datasets.Value("bool"))}
    )
    return examples.map(
        count,
        batched=True,
        batch_size=_AT_ONCE,
        features=features,
        load_from_cache_file=False,
        new_fingerprint="counted",  # else it pickles the tokenizers for one
        keep_in_memory=True,
    )


def _lengths(lists: pa.Array) -> np.ndarray:
    return np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
