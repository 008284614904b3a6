"""The tokens of lists of words: each list is tokenised once, and its windows are slices of that.

Words of a list are tokenised one by one, whatever stands around them, so a window's tokens are
those of its words, with what the tokenizer sets around a whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_distill.data.cutting import column_of, lists_of, token_columns
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.data.words import NO_TOKEN

OVERLAP = 4
"""A window shares a quarter of its words with the next one."""


@dataclass(frozen=True)
class WordTokens:
    """The tokens of a list of n words, t in all, without special ones."""

    ids: np.ndarray
    """int32 [t]"""
    offsets: np.ndarray
    """int64 [n + 1]: the number of each word's first token, and t."""

    @staticmethod
    def of_lists(
        tokenizer: PreTrainedTokenizerBase, lists: Sequence[Sequence[str]]
    ) -> list[WordTokens]:
        """Of some lists of words."""
        encoded = tokenizer(
            lists,
            is_split_into_words=True,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no word on those that are longer than a model reads
        )
        found = []
        for number, (words, ids) in enumerate(zip(lists, encoded["input_ids"], strict=True)):
            of_token = np.array(encoded.word_ids(number), dtype=np.int64)
            offsets = np.searchsorted(of_token, np.arange(len(words) + 1))
            found.append(WordTokens(np.array(ids, dtype=np.int32), offsets))
        return found

    def first(self, words: int) -> WordTokens:
        """Of the first words alone."""
        offsets = self.offsets[: words + 1]
        return WordTokens(self.ids[: offsets[-1]], offsets)


@dataclass(frozen=True)
class WordView:
    """Some words as a model reads them, with special tokens, cut where they are too many."""

    input_ids: np.ndarray
    """int32 [T]"""
    token_type_ids: np.ndarray
    """int8 [T]"""
    first_tokens: np.ndarray
    """int16 [words]: the position of each word's first token, or NO_TOKEN."""
    token_counts: np.ndarray
    """int16 [words]: how many tokens of each word there are. They stand one after the other."""


class WordViews:
    """Makes a model's views of lists of words, or of questions' words and those behind them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, *, pairs: bool = False
    ) -> None:
        """max_length: tokens of a view. Of a pair the second list alone is cut."""
        word = [["a"]]
        around = tokenizer(
            word, word if pairs else None, is_split_into_words=True, return_token_type_ids=True
        )
        parts = np.array([-1 if part is None else part for part in around.sequence_ids(0)])
        first, last = np.flatnonzero(parts == 0), np.flatnonzero(parts == int(pairs))
        ids = np.array(around["input_ids"][0], dtype=np.int32)
        types = np.array(around["token_type_ids"][0], dtype=np.int8)
        self._before, self._types_before = ids[: first[0]], types[: first[0]]
        between = slice(first[-1] + 1, last[0]) if pairs else slice(0, 0)
        self._between, self._types_between = ids[between], types[between]
        self._after, self._types_after = ids[last[-1] + 1 :], types[last[-1] + 1 :]
        self._types = types[[first[0], last[0]]]
        self._from_left = tokenizer.truncation_side == "left"
        special = len(self._before) + len(self._between) + len(self._after)
        self.room = max_length - special
        """Tokens of words, of both lists together."""

    def view(
        self,
        tokens: WordTokens,
        question: WordTokens | None = None,
        first: int = 0,
        end: int | None = None,
    ) -> WordView:
        """Of the words from `first` up to `end`, or of all, behind those of a question."""
        offsets = tokens.offsets[first : None if end is None else end + 1]
        ids = tokens.ids[offsets[0] : offsets[-1]]
        asked = tokens.ids[:0] if question is None else question.ids
        room = max(0, self.room - len(asked))
        cut = max(0, len(ids) - room) if self._from_left else 0
        ids = ids[cut : cut + room]
        bounds = np.clip(offsets - offsets[0] - cut, 0, len(ids))
        counts, start = np.diff(bounds), len(self._before) + len(asked) + len(self._between)
        parts = (self._before, asked, self._between, ids, self._after)
        types = (
            *(self._types_before, np.full(len(asked), self._types[0]), self._types_between),
            *(np.full(len(ids), self._types[1]), self._types_after),
        )
        return WordView(
            np.concatenate(parts),
            np.concatenate(types).astype(np.int8),
            np.where(counts > 0, start + bounds[:-1], NO_TOKEN).astype(np.int16),
            counts.astype(np.int16),
        )


class WindowViews:
    """Cuts lists of words into windows for some tokenizers."""

    def __init__(
        self,
        tokenizers: Sequence[PreTrainedTokenizerBase],
        max_length: int,
        *,
        pairs: bool = False,
    ) -> None:
        """Of tokenizers with the same tokens one is used."""
        by_tokens = {tokens_fingerprint(tokenizer): tokenizer for tokenizer in tokenizers}
        self._fingerprints = list(by_tokens)
        self._tokenizers, self._pairs = list(by_tokens.values()), pairs
        self._views = [
            WordViews(tokenizer, max_length, pairs=pairs) for tokenizer in self._tokenizers
        ]
        self._most_asked = max_length // 2

    @property
    def features(self) -> dict[str, Any]:
        """Of what `columns` gives."""
        kinds = {"counted": "bool"}
        for fingerprint in self._fingerprints:
            kinds |= token_columns(fingerprint, of_words=True, pairs=self._pairs)
        return lists_of(kinds)

    def tokens(self, lists: Sequence[Sequence[str]]) -> list[list[WordTokens]]:
        """Of each list its tokens, by tokenizer."""
        by_tokenizer = (WordTokens.of_lists(tokenizer, lists) for tokenizer in self._tokenizers)
        return [list(of_list) for of_list in zip(*by_tokenizer, strict=True)]

    def kept(self, question: Sequence[WordTokens]) -> int:
        """How many of a question's words half of `max_length` holds in every view."""
        return min(
            int(np.searchsorted(tokens.offsets[1:], self._most_asked, side="right"))
            for tokens in question
        )

    def windows(
        self, tokens: Sequence[WordTokens], question: Sequence[WordTokens] | None = None
    ) -> Iterator[tuple[int, int, np.ndarray, list[WordView]]]:
        """Windows that cover a list of words: the number of each one's first word and of the one
        after its last; of each word whether it belongs to this window, bool; and its views.

        tokens, question: by tokenizer; the question is already as short as it is read.
        """
        asked: Sequence[WordTokens | None] = question or [None] * len(tokens)
        rooms = [
            views.room - (0 if of_question is None else len(of_question.ids))
            for views, of_question in zip(self._views, asked, strict=True)
        ]
        found = list(ranges([of_one.offsets for of_one in tokens], rooms))
        owner = owners(found, len(tokens[0].offsets) - 1)
        for number, (first, end) in enumerate(found):
            views = [
                of_model.view(of_one, of_question, first, end)
                for of_model, of_one, of_question in zip(self._views, tokens, asked, strict=True)
            ]
            yield first, end, owner[first:end] == number, views

    def columns(self, views: Sequence[WordView]) -> dict[str, np.ndarray]:
        """Of a window whether each word has a token in every view; and its tokens."""
        found = {"counted": np.all([view.first_tokens != NO_TOKEN for view in views], axis=0)}
        for fingerprint, view in zip(self._fingerprints, views, strict=True):
            columns = token_columns(fingerprint, of_words=True, pairs=self._pairs)
            found |= {column: getattr(view, column_of(column)) for column in columns}
        return found


def room(first: int, end: int, total: int) -> np.ndarray:
    """How far each word of a window is from the nearer end of it that is no end of the text: int64
    [end - first].

    first, end: numbers of its first word and of the one after its last. total: words of the text.
    """
    number, last = np.arange(end - first), end - first - 1
    left = number if first else np.full(len(number), total)
    right = last - number if end < total else np.full(len(number), total)
    return np.minimum(left, right)


def ranges(tokens: Sequence[np.ndarray], rooms: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Windows that cover a text, first word and end of each: as many words as have room in every
    view. A word that is too long for one is a window alone, and is cut there.

    tokens: by tokenizer, int64 [words + 1], the number of each word's first token, and all. rooms:
    by tokenizer, how many there is room for.
    """
    first, total = 0, len(tokens[0]) - 1
    while True:
        fits = (
            int(np.searchsorted(offsets, offsets[first] + room, side="right")) - 1
            for offsets, room in zip(tokens, rooms, strict=True)
        )
        end = max(first + 1, min(fits))
        yield first, end
        if end >= total:
            return
        first = max(first + 1, end - (end - first) // OVERLAP)


def owners(windows: Sequence[tuple[int, int]], total: int) -> np.ndarray:
    """The number of the window where each word has most around it, of equals the first: int64
    [total]."""
    owner, most = np.zeros(total, dtype=np.int64), np.full(total, -1)
    for number, (first, end) in enumerate(windows):
        here = room(first, end, total)
        better = here > most[first:end]
        owner[first:end][better], most[first:end][better] = number, here[better]
    return owner
