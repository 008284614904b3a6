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

VERSION = 1
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
    the last two as the whole text has them. A word that is longer than a window is cut inside; a
    character of more tokens than a window has is a window of its own.

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

    The fast way counts the tokens of each word once, in the whole text, and adds them up. That is
    right where words are tokenised each on its own, as BERT, RoBERTa and DeBERTa do; the first word
    of a window is counted alone, because a space before it may be part of a token. Each window is
    then tokenised as it is; where that gives another number, or a word is too long, the text goes
    the exact way, which tokenises every candidate.
    """

    def __init__(self, tokenizers: Sequence[PreTrainedTokenizerBase], max_length: int) -> None:
        self._tokenizers = tokenizers
        self._max_length = max_length
        self._special = [t.num_special_tokens_to_add() for t in tokenizers]
        self._rooms = [max_length - special for special in self._special]
        self._alone: list[dict[str, int]] = [{} for _ in tokenizers]

    def ranges(self, texts: list[str]) -> list[list[Range]]:
        """The windows of each text, one or more."""
        tokens = [_last_characters(tokenizer, texts) for tokenizer in self._tokenizers]
        found: list[list[Range]] = [[(0, len(text))] for text in texts]
        predicted: dict[int, np.ndarray] = {}  # text -> tokens of its windows, by tokenizer
        for number, text in enumerate(texts):
            here = [each[number] for each in tokens]
            if any(len(t) > room for t, room in zip(here, self._rooms, strict=True)):
                found[number], predicted[number] = self._fast(text, here)
        if not predicted:
            return found
        windows = [texts[n][a:b] for n in predicted for a, b in found[n]]
        right = np.ones(len(windows), dtype=bool)
        for column, tokenizer in enumerate(self._tokenizers):
            lengths = [counts[:, column] for counts in predicted.values()]
            if windows:
                right &= token_lengths(tokenizer, windows) == np.concatenate(lengths)
        ends = np.cumsum([len(found[number]) for number in predicted])
        for number, ok in zip(predicted, np.split(right, ends[:-1]), strict=True):
            if not (found[number] and ok.all()):
                found[number] = self._exact(texts[number])
        return found

    def _fast(self, text: str, tokens: list[np.ndarray]) -> tuple[list[Range], np.ndarray]:
        """(windows, their tokens by tokenizer: int64 [N, tokenizers]); none where a word is too
        long.

        tokens: of the whole text, see `_last_characters`.
        """
        spans = np.array([m.span() for m in _WORD.finditer(text)], dtype=np.int64).reshape(-1, 2)
        sums = []  # tokens up to and with a word; white space counts to the word after it
        for last in tokens:
            of_word = np.searchsorted(spans[:, 1], last, side="right")
            sums.append(np.bincount(of_word, minlength=len(spans))[: len(spans)].cumsum())
        ranges: list[Range] = []
        lengths: list[list[int]] = []
        first = 0
        while first < len(spans):
            word = text[slice(*spans[first])]
            alone = [self._tokens_alone(number, word) for number in range(len(sums))]
            end = len(spans)
            for room, count, total in zip(self._rooms, alone, sums, strict=True):
                if count > room:
                    return [], np.empty((0, len(sums)), dtype=np.int64)
                limit = total[first] + room - count
                end = min(end, int(np.searchsorted(total, limit, side="right")))
            ranges.append((int(spans[first, 0]), int(spans[end - 1, 1])))
            added = [int(total[end - 1] - total[first]) for total in sums]
            lengths.append([sum(each) for each in zip(alone, added, self._special, strict=True)])
            first = end
        return ranges, np.array(lengths, dtype=np.int64).reshape(-1, len(sums))

    def _tokens_alone(self, number: int, word: str) -> int:
        """Tokens of a word at the beginning of a text."""
        known = self._alone[number]
        if word not in known:
            [known[word]] = token_lengths(self._tokenizers[number], [word], special_tokens=False)
        return known[word]

    def _exact(self, text: str) -> list[Range]:
        """The windows of one text. Each is tokenised, and one word (or character) more, too."""
        words = [match.span() for match in _WORD.finditer(text)]
        if not words:
            return [(0, 0)]
        ends = [end for _, end in words]
        ranges: list[Range] = []
        word, start = 0, words[0][0]
        while word < len(words):
            count = self._longest(text, start, ends, word)
            end = ends[word + count - 1]
            if count == 0:  # not even the first word, or what is left of it
                letters = range(start + 1, ends[word] + 1)
                end = start + max(1, self._longest(text, start, letters, 0))
            ranges.append((start, end))
            word += count
            start = end if count == 0 else words[word][0] if word < len(words) else end
            if word < len(words) and start == ends[word]:
                word += 1
                start = words[word][0] if word < len(words) else end
        return ranges

    def _longest(self, text: str, start: int, ends: Sequence[int], first: int) -> int:
        """How many of the ends from number `first` on make a window that fits, where one more does
        not: found in steps that double, then in halves."""
        low, high, step = 0, len(ends) - first + 1, 64
        while low + 1 < high:
            middle = min(low + step, high - 1) if step else (low + high) // 2
            if self._fits(text[start : ends[first + middle - 1]]):
                low, step = middle, step * 2
            else:
                high, step = middle, 0
        return low

    def _fits(self, text: str) -> bool:
        return all(token_lengths(t, [text])[0] <= self._max_length for t in self._tokenizers)
