"""Cut long texts into windows that models can read whole.

A window is a range of the text's characters, from there on an example like any other: it is found
by its own text, so a cache of it does not depend on a tokenizer. It ends between words, and it is
as long as every tokenizer allows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from ds_distill.data.cutting import of_whole_example
from ds_distill.data.lengths import token_lengths
from ds_distill.data.tokenizer import tokenizer_fingerprint
from ds_distill.keys import content_keys
from ds_distill.process.activity import mark

VERSION = 2
"""Part of the fingerprint: raise it when the same texts give other windows."""

BATCH = 200

_WORD = re.compile(r"[^ \t\n\r]+")
"""Only what every tokenizer takes for white space separates words: BERT's removes U+000B, and joins
what stands around it."""


def split_long(
    examples: datasets.Dataset, tokenizers: Sequence[PreTrainedTokenizerBase], max_length: int
) -> datasets.Dataset:
    """Each text as windows that have at most `max_length` tokens, special tokens included, by all
    tokenizers. A text that fits stays as it is.

    examples: columns `text`, `label`, `key_hi`, `key_lo`, `copy` and `group`. The result has these,
    the last two as the whole text has them. A word that is longer than a window is cut inside.
    Where the tokens of a word depend on others, a window may have some too many.

    Raises ValueError for pairs of texts.
    """
    if "text_b" in examples.column_names:
        raise ValueError("pairs of texts cannot be cut into windows")
    splitter = _Splitter(tokenizers, max_length)
    of_whole = of_whole_example(examples)

    def windows(batch: dict[str, list[Any]]) -> dict[str, Any]:
        mark("splits long texts", done=len(batch["text"]))
        ranges = splitter.ranges(batch["text"])
        texts = [t[a:b] for t, found in zip(batch["text"], ranges, strict=True) for a, b in found]
        numbers = np.repeat(np.arange(len(ranges)), [len(found) for found in ranges])
        keys = content_keys(texts)
        kept = {name: [batch[name][n] for n in numbers] for name in ("label", *of_whole)}
        return {"text": texts, "key_hi": keys[:, 0], "key_lo": keys[:, 1], **kept}

    state = [VERSION, max_length, examples._fingerprint, *map(tokenizer_fingerprint, tokenizers)]
    return examples.map(
        windows,
        batched=True,
        batch_size=BATCH,
        remove_columns=examples.column_names,
        features=datasets.Features({**_FEATURES, **of_whole}),
        new_fingerprint=xxhash.xxh3_64_hexdigest(str(state).encode()),
    )


_FEATURES = {
    "text": datasets.Value("string"),
    **{name: datasets.Value("int64") for name in ("label", "key_hi", "key_lo")},
}


def _last_characters(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Where the last character of each token stands, without special tokens: int64 [tokens]."""
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        truncation=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    found = []
    for offsets in encoded["offset_mapping"]:
        places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        found.append(np.maximum(places[:, 1] - 1, places[:, 0]))
    return found


Range = tuple[int, int]
"""From and to a character of a text."""


class _Splitter:
    """Finds windows.

    The tokens of each word are counted once, in the whole text, and added up. That is right where
    words are tokenised each on its own, as BERT, RoBERTa and DeBERTa do; the first word of a window
    is counted alone, because a space before it may be part of a token.
    """

    def __init__(self, tokenizers: Sequence[PreTrainedTokenizerBase], max_length: int) -> None:
        self._tokenizers = tokenizers
        self._rooms = [max_length - t.num_special_tokens_to_add() for t in tokenizers]
        self._alone: list[dict[str, int]] = [{} for _ in tokenizers]

    def ranges(self, texts: list[str]) -> list[list[Range]]:
        """The windows of each text, one or more."""
        by_tokenizer = (_last_characters(tokenizer, texts) for tokenizer in self._tokenizers)
        return [
            self._windows(text, tokens) for text, *tokens in zip(texts, *by_tokenizer, strict=True)
        ]

    def _windows(self, text: str, tokens: Sequence[np.ndarray]) -> list[Range]:
        """tokens: by tokenizer, see `_last_characters`."""
        if all(len(last) <= room for last, room in zip(tokens, self._rooms, strict=True)):
            return [(0, len(text))]
        spans, counts = self._words(text, tokens)
        sums = [of_word.cumsum() for of_word in counts]
        found: list[Range] = []
        first = 0
        while first < len(spans):
            word, end = text[slice(*spans[first])], len(spans)
            for number, (room, total) in enumerate(zip(self._rooms, sums, strict=True)):
                limit = total[first] + room - self._tokens_alone(number, word)
                end = min(end, int(np.searchsorted(total, limit, side="right")))
            end = max(end, first + 1)
            found.append((int(spans[first, 0]), int(spans[end - 1, 1])))
            first = end
        return found or [(0, 0)]

    def _words(
        self, text: str, tokens: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Where words begin and end, int64 [words, 2], and by tokenizer how many tokens each has:
        int64 [words]. White space counts to the word after it. A word of more tokens than there is
        room for is halved, until its parts have room."""
        spans = np.array([m.span() for m in _WORD.finditer(text)], dtype=np.int64).reshape(-1, 2)
        while True:
            of_word = (np.searchsorted(spans[:, 1], last, side="right") for last in tokens)
            counts = [np.bincount(word, minlength=len(spans))[: len(spans)] for word in of_word]
            rooms = np.array(self._rooms)[:, None]
            long = (np.stack(counts) > rooms).any(axis=0) & (spans[:, 1] - spans[:, 0] > 1)
            if not long.any():
                return spans, counts
            middle = np.where(long, spans.sum(axis=1) // 2, spans[:, 1])
            halves = np.stack([spans[:, 0], middle, middle, spans[:, 1]], axis=1).reshape(-1, 2)
            spans = halves[halves[:, 0] < halves[:, 1]]

    def _tokens_alone(self, number: int, word: str) -> int:
        """Tokens of a word at the beginning of a text."""
        known = self._alone[number]
        if word not in known:
            [known[word]] = token_lengths(self._tokenizers[number], [word], special_tokens=False)
        return known[word]
