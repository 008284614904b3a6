"""The tokens of texts and of lists of words: each is tokenised once, and its windows are slices of
that, with what the tokenizer sets around a whole text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain

import numpy as np
from transformers import PreTrainedTokenizerBase

NO_TOKEN = -1
"""The position of a word that has no token in a view: the tokenizer drops it, or it is cut off."""

OVERLAP = 4
"""A window of words shares a quarter of them with the next one."""

_WORD = re.compile(r"[^ \t\n\r]+")
"""Only what every tokenizer takes for white space separates words: BERT's removes U+000B, and joins
what stands around it."""

_ALONE = 2**16
"""Words whose own tokens are remembered."""


@dataclass(frozen=True)
class WordTokens:
    """The tokens of a list of n words, t in all, without special ones. Words of a list are
    tokenised one by one, whatever stands around them."""

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


NO_WORDS = WordTokens(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64))


class Views:
    """Makes what a model reads: of a text, or of a question and a text behind it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, *, pairs: bool = False
    ) -> None:
        """max_length: tokens of a view. Of a pair the text alone is cut."""
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
        """Tokens of texts, of question and text together."""

    def view(
        self, ids: np.ndarray, asked: np.ndarray = NO_WORDS.ids
    ) -> tuple[dict[str, np.ndarray], int, slice]:
        """`input_ids`, int32 [T], and `token_type_ids`, int8 [T], where the text's tokens begin in
        them, and which of its tokens are read.

        ids, asked: tokens of the text and of the question, without special ones.
        """
        room = max(0, self.room - len(asked))
        cut = max(0, len(ids) - room) if self._from_left else 0
        ids = ids[cut : cut + room]
        types = (
            *(self._types_before, np.full(len(asked), self._types[0]), self._types_between),
            *(np.full(len(ids), self._types[1]), self._types_after),
        )
        found = {
            "input_ids": np.concatenate((self._before, asked, self._between, ids, self._after)),
            "token_type_ids": np.concatenate(types).astype(np.int8),
        }
        start = len(self._before) + len(asked) + len(self._between)
        return found, start, slice(cut, cut + len(ids))

    def of_words(
        self, tokens: WordTokens, question: WordTokens, first: int = 0, end: int | None = None
    ) -> dict[str, np.ndarray]:
        """A view of the words from `first` up to `end`, or of all; with `places`, the position of
        each word's first token or NO_TOKEN, and `token_counts`: int16 [words]."""
        offsets = tokens.offsets[first : None if end is None else end + 1]
        ids = tokens.ids[offsets[0] : offsets[-1]]
        found, start, kept = self.view(ids, question.ids)
        bounds = np.clip(offsets - offsets[0], kept.start, kept.stop) - kept.start
        counts = np.diff(bounds)
        found["places"] = np.where(counts > 0, start + bounds[:-1], NO_TOKEN).astype(np.int16)
        return {**found, "token_counts": counts.astype(np.int16)}


def room(first: int, end: int, total: int) -> np.ndarray:
    """How far each word of a window is from the nearer end of it that is no end of the text: int64
    [end - first].

    first, end: numbers of its first word and of the one after its last. total: words of the text.
    """
    number, last = np.arange(end - first), end - first - 1
    left = number if first else np.full(len(number), total)
    right = last - number if end < total else np.full(len(number), total)
    return np.minimum(left, right)


def a_quarter(first: int, end: int) -> int:
    """Where the next window of words begins."""
    return end - (end - first) // OVERLAP


def ranges(
    tokens: Sequence[np.ndarray],
    rooms: Sequence[int],
    following: Callable[[int, int], int] = a_quarter,
    lone: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[tuple[int, int]]:
    """Windows that cover a text, first word and end of each: as many words as have room in every
    view. A word that is too long for one is a window alone, and is cut there.

    tokens: by tokenizer, int64 [words + 1], the number of each word's first token, and all. rooms:
    by tokenizer, how many there is room for. following: where the window after (first, end) begins.
    lone: by tokenizer, how many tokens a word has where a window begins with it; None: as many as
    elsewhere.
    """
    first, total = 0, len(tokens[0]) - 1
    while True:
        begins = [int(offsets[first]) for offsets in tokens]
        if lone is not None:
            ends = [int(offsets[first + 1]) for offsets in tokens]
            begins = [end - count for end, count in zip(ends, lone(first), strict=True)]
        fits = (
            int(np.searchsorted(offsets, begin + room, side="right")) - 1
            for offsets, begin, room in zip(tokens, begins, rooms, strict=True)
        )
        end = max(first + 1, min(fits))
        yield first, end
        if end >= total:
            return
        first = max(first + 1, following(first, end))


def owners(windows: Sequence[tuple[int, int]], total: int) -> np.ndarray:
    """The number of the window where each word has most around it, of equals the first: int64
    [total]."""
    owner, most = np.zeros(total, dtype=np.int64), np.full(total, -1)
    for number, (first, end) in enumerate(windows):
        here = room(first, end, total)
        better = here > most[first:end]
        owner[first:end][better], most[first:end][better] = number, here[better]
    return owner


@dataclass(frozen=True)
class TextTokens:
    """The t tokens of a text, without special ones."""

    ids: np.ndarray
    """int32 [t]"""
    spans: np.ndarray
    """int64 [t, 2]: first character and end of each."""

    @staticmethod
    def of_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[TextTokens]:
        encoded = tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            TextTokens(
                np.array(ids, dtype=np.int32),
                np.fromiter(chain.from_iterable(at), np.int64, 2 * len(ids)).reshape(-1, 2),
            )
            for ids, at in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    @property
    def lasts(self) -> np.ndarray:
        """The last character of each, ascending: int64 [t]."""
        return np.maximum.accumulate(np.maximum(self.spans[:, 1] - 1, self.spans[:, 0]))

    def and_then(self, other: TextTokens) -> TextTokens:
        return TextTokens(
            np.concatenate([self.ids, other.ids]), np.concatenate([self.spans, other.spans])
        )


class TextCutter:
    """Cuts texts between words into windows for some tokenizers.

    The tokens of a window are those of its part of the text. That is right where words are
    tokenised each on its own, as BERT, RoBERTa and DeBERTa do. Where a space may be
    part of a token, as of RoBERTa's, the first word of a window is tokenised alone.
    """

    def __init__(self, tokenizers: Sequence[PreTrainedTokenizerBase]) -> None:
        self._tokenizers = tokenizers

        @lru_cache(_ALONE)
        def alone(number: int, word: str) -> TextTokens:
            return TextTokens.of_texts(tokenizers[number], [word])[0]

        self._alone = alone

    def tokens(self, texts: Sequence[str]) -> list[list[TextTokens]]:
        """Of each text its tokens, by tokenizer."""
        by_tokenizer = (TextTokens.of_texts(tokenizer, texts) for tokenizer in self._tokenizers)
        return [list(of_text) for of_text in zip(*by_tokenizer, strict=True)]

    def windows(
        self,
        text: str,
        tokens: Sequence[TextTokens],
        rooms: Sequence[int],
        overlap: int = 0,
    ) -> Iterator[tuple[int, int, list[TextTokens]]]:
        """Windows that cover a text, as long as all tokenizers have room for: first character and
        end, and its tokens by tokenizer, whose characters are counted in the window. A text that
        fits is one window. A word that is too long is cut between tokens; a window with a part of
        one is tokenised by itself, for a cache finds it by its text, and may have tokens beyond
        the room.

        overlap: tokens of the first tokenizer that windows share, at most.
        """
        if all(len(of_one.ids) <= room for of_one, room in zip(tokens, rooms, strict=True)):
            yield 0, len(text), [*tokens]
            return
        lasts = [of_one.lasts for of_one in tokens]
        words, offsets, cut = _words(text, tokens, lasts, rooms)
        if not len(words):
            yield 0, 0, [_part(of_one, 0, 0, 0) for of_one in tokens]
            return

        def first_word(first: int) -> list[TextTokens]:
            start, end = words[first]
            return [self._alone(number, text[start:end]) for number in range(len(tokens))]

        def lone(first: int) -> list[int]:
            if not cut[first]:
                return [len(of_one.ids) for of_one in first_word(first)]
            begins = (np.searchsorted(last, words[first, 0]) for last in lasts)
            ends = (of_word[first + 1] for of_word in offsets)
            return [int(end - begin) for begin, end in zip(begins, ends, strict=True)]

        def following(first: int, end: int) -> int:
            back = np.searchsorted(offsets[0], offsets[0][end] - overlap, side="left")
            return min(int(back), end)

        for first, end in ranges(offsets, rooms, following, lone):
            start, stop = int(words[first, 0]), int(words[end - 1, 1])
            if cut[first:end].any():
                numbers = range(len(tokens))
                yield start, stop, [self._alone(number, text[start:stop]) for number in numbers]
                continue
            found = [
                one.and_then(_part(of_one, of_word[first + 1], of_word[end], start))
                for one, of_one, of_word in zip(first_word(first), tokens, offsets, strict=True)
            ]
            yield start, stop, found


def _part(tokens: TextTokens, first: int, end: int, start: int) -> TextTokens:
    """Some tokens, in a window that begins at a character of their text."""
    return TextTokens(tokens.ids[first:end], tokens.spans[first:end] - start)


def _words(
    text: str, tokens: Sequence[TextTokens], lasts: Sequence[np.ndarray], rooms: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Where words begin and end, int64 [words, 2]; by tokenizer the number of each one's first
    token and of the one after the last, int64 [words + 1]; and which are parts of a word that is
    too long, bool [words]: these end wherever all tokenizers cut it. White space counts to the word
    after it."""
    words = np.array([m.span() for m in _WORD.finditer(text)], dtype=np.int64).reshape(-1, 2)

    def offsets(ends: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate([[0], np.searchsorted(last, ends)]) for last in lasts]

    counts = np.stack([np.diff(of_one) for of_one in offsets(words[:, 1])])
    long: np.ndarray = np.max(counts > np.array(rooms)[:, None], axis=0)
    if not long.any():
        return words, offsets(words[:, 1]), long
    cuts = reduce(np.intersect1d, [_cuts(of_one.spans) for of_one in tokens])
    of_word = np.searchsorted(words[:, 1], cuts, side="right")
    inside = long[of_word.clip(max=len(words) - 1)] & (of_word < len(words))
    inside &= cuts > words[of_word.clip(max=len(words) - 1), 0]
    begins = np.sort(np.concatenate([words[:, 0], cuts[inside]]))
    ends = np.sort(np.concatenate([words[:, 1], cuts[inside]]))
    parts = long[np.searchsorted(words[:, 1], begins, side="right")]
    return np.stack([begins, ends], axis=1), offsets(ends), parts


def _cuts(spans: np.ndarray) -> np.ndarray:
    """The first characters of tokens that share none with the one before them."""
    return spans[1:, 0][spans[1:, 0] >= spans[:-1, 1]]
