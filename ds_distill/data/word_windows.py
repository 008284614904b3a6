"""The windows of words in which models read the context of a question that has any number of
answers.

A window is some of the context's words in their order, behind the question's: from there on an
example like any list of words, found by its own content key. It is as long as every tokenizer of
the recipe allows, so that the same words are in every model's view. Windows overlap, and a word
counts in one of them: where it has most around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from ds_distill.data.groups import MARKS
from ds_distill.data.words import (
    NO_TOKEN,
    Words,
    encode_words,
    first_tokens,
    flat_lists,
    word_keys,
    words_of,
)
from ds_distill.models.configuration import tokenizer_fingerprint
from ds_distill.parts.tags import IN_SPAN, OUTSIDE, SPAN_TAGS
from ds_distill.progress import mark

OVERLAP = 4
"""A window shares a quarter of its words with the next one."""

VERSION = "windows of words 1"
"""Part of the fingerprint: change it when the same contexts give other windows."""

_AT_ONCE = 200


@dataclass(frozen=True)
class ContextWords(Words):
    """The words of N windows, R in all. A word that is in several windows is a row of each, and
    counts in one of them; one that has no token in some model's view counts in none."""

    question: np.ndarray
    """int64 [N]: the number of each window's question, ascending."""
    first: np.ndarray
    """int64 [N]: the number, in the context, of each window's first word."""
    spans: np.ndarray
    """int64 [R, 2]: first character and end of each word, in the context."""
    answers: np.ndarray
    """int64 [A, 3]: the right answers: question, first character, end. They may overlap."""

    @staticmethod
    def of(split: datasets.Dataset) -> ContextWords:
        """Of a prepared split; see `prepare`."""
        offsets, counted = flat_lists(split, "counted")
        starts, ends = (flat_lists(split, name)[1] for name in ("starts", "ends"))
        numbers = split.select_columns(["number", "first"]).with_format("numpy")[:]
        question = numbers["number"].astype(np.int64)
        per_window, begins = flat_lists(split, "answer_starts")
        of_answer = np.repeat(question, np.diff(per_window))
        answers = np.stack([of_answer, begins, flat_lists(split, "answer_ends")[1]], axis=1)
        return ContextWords(
            offsets,
            counted,
            question,
            numbers["first"].astype(np.int64),
            np.stack([starts, ends], axis=1).astype(np.int64),
            answers.astype(np.int64),
        )

    def at(self, indices: np.ndarray) -> ContextWords:
        """Those of some windows, in ascending order; of a question all windows or none."""
        words, rows = super().at(indices), self.of_examples(indices)
        question = self.question[indices]
        here = np.unique(question)  # answers are in the order of their questions
        begins = np.searchsorted(self.answers[:, 0], here, "left")
        counts = np.searchsorted(self.answers[:, 0], here, "right") - begins
        kept = np.repeat(begins - (np.cumsum(counts) - counts), counts)
        answers = self.answers[kept + np.arange(len(kept))]
        first, spans = self.first[indices], self.spans[rows]
        return ContextWords(words.offsets, words.counted, question, first, spans, answers)

    @property
    def firsts(self) -> np.ndarray:
        """The first window of each question: int64 [Q]."""
        return np.unique(self.question, return_index=True)[1]

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows that count, in the order of their questions and words: int64 [K]."""
        counted = np.flatnonzero(self.counted)
        return counted[np.lexsort((self.numbers[counted], self.question_of[counted]))]

    @cached_property
    def question_of(self) -> np.ndarray:
        """The position of each row's question among those that are here: int64 [R]."""
        return np.unique(self.question, return_inverse=True)[1][self.examples]

    @cached_property
    def numbers(self) -> np.ndarray:
        """The number of each row's word in its context: int64 [R]."""
        within = np.arange(len(self.counted)) - self.offsets[self.examples]
        return self.first[self.examples] + within

    @property
    def lost(self) -> int:
        """How many words count in no window."""
        ends = self.first + np.diff(self.offsets)
        of_question = np.unique(self.question, return_inverse=True)[1]
        words = np.zeros(len(self.firsts), dtype=np.int64)
        np.maximum.at(words, of_question, ends)
        return int(words.sum() - self.counted.sum())


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

    tokens: by tokenizer, int64 [words], how many each word has. rooms: by tokenizer, how many there
    is room for.
    """
    sums = [np.concatenate([[0], np.cumsum(of_one)]) for of_one in tokens]
    first, total = 0, len(tokens[0])
    while True:
        fits = (
            int(np.searchsorted(sums_of_one, sums_of_one[first] + room, side="right")) - 1
            for sums_of_one, room in zip(sums, rooms, strict=True)
        )
        end = max(first + 1, min(fits))
        yield first, end
        if end >= total:
            return
        first = max(first + 1, end - (end - first) // OVERLAP)


def token_counts(tokenizer: PreTrainedTokenizerBase, texts: list[list[str]]) -> list[np.ndarray]:
    """How many tokens each word of some lists of words has: int64 [words] each."""
    encoded = tokenizer(texts, is_split_into_words=True, add_special_tokens=False, verbose=False)
    return [
        np.bincount(
            [word for word in encoded.word_ids(number) if word is not None], minlength=len(words)
        )
        for number, words in enumerate(texts)
    ]


def prepare(
    examples: datasets.Dataset, tokenizers: list[PreTrainedTokenizerBase], max_length: int
) -> datasets.Dataset:
    """Each question with each window of its context: at most `max_length` tokens together in every
    model's view. A question that is longer than half of that in some view is cut.

    examples: columns as of `questions.EXAMPLES`, and `MARKS`.

    The result has `question` and `words`, lists of words; keys of both, and marks; `label`: of
    each word whether one of its characters is in an answer (the class ids of `SPAN_TAGS`), -1 where
    answers are not known; `counted`: whether it counts here; `starts` and `ends`: its characters in
    the context; `number`: the question's; `first`: the number of the first word in the context;
    `answer_starts` and `answer_ends`: of a context's first window, the right answers.
    """
    cutter = _Cutter(tokenizers, max_length)

    def windows(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        mark("cuts contexts into windows", done=len(numbers))
        columns = (batch[name] for name in ("text", "text_b", "answers", *MARKS))
        rows = [
            {**window, "copy": copy, "group": group, "number": number}
            for number, *row, copy, group in zip(numbers, *columns, strict=True)
            for window in cutter.windows(*row)
        ]
        keys = word_keys([[row["question"], row["words"]] for row in rows])
        counted = cutter.counted(rows)
        for row, (high, low), here in zip(rows, keys, counted, strict=True):
            row.update(key_hi=high, key_lo=low, counted=here)
        return {name: [row[name] for row in rows] for name in _FEATURES}

    state = [VERSION, max_length, examples._fingerprint, *map(tokenizer_fingerprint, tokenizers)]
    return examples.map(
        windows,
        batched=True,
        with_indices=True,
        batch_size=_AT_ONCE,
        remove_columns=examples.column_names,
        features=_FEATURES,
        new_fingerprint=xxhash.xxh3_64_hexdigest(str(state).encode()),
    )


_FEATURES = datasets.Features(
    {
        **{name: datasets.List(datasets.Value("string")) for name in ("question", "words")},
        "label": datasets.List(datasets.Value("int16")),
        "counted": datasets.List(datasets.Value("bool")),
        **{name: datasets.Value("int64") for name in ("key_hi", "key_lo", *MARKS, "number")},
        "first": datasets.Value("int32"),
        **{
            name: datasets.List(datasets.Value("int32"))
            for name in ("starts", "ends", "answer_starts", "answer_ends")
        },
    }
)


class _Cutter:
    """Cuts contexts into windows for some tokenizers."""

    def __init__(self, tokenizers: list[PreTrainedTokenizerBase], max_length: int) -> None:
        self._tokenizers, self._max_length = tokenizers, max_length

    def windows(
        self, question: str, context: str, answers: list[dict[str, Any]] | None
    ) -> Iterator[dict[str, Any]]:
        """All of `prepare`'s columns that can be known of one context. `counted` says whether the
        window is the one where a word may count."""
        asked, rooms = question_words(self._tokenizers, question, self._max_length)
        spans = words_of(context)
        words = [context[start:end] for start, end in spans]
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        given = [(a["start"], a["start"] + len(a["text"])) for a in answers or ()]
        label = np.full(len(words), -1 if answers is None else SPAN_TAGS.index(OUTSIDE))
        for begin, stop in given:
            label[(starts < stop) & (begin < ends)] = SPAN_TAGS.index(IN_SPAN)
        tokens = [token_counts(tokenizer, [words])[0] for tokenizer in self._tokenizers]
        found = list(ranges(tokens, rooms))
        owner = owners(found, len(words))
        for number, (first, end) in enumerate(found):
            yield {
                "question": asked,
                "words": words[first:end],
                "label": label[first:end],
                "counted": owner[first:end] == number,
                "starts": starts[first:end],
                "ends": ends[first:end],
                "first": first,
                "answer_starts": [begin for begin, _ in given if number == 0],
                "answer_ends": [stop for _, stop in given if number == 0],
            }

    def counted(self, rows: list[dict[str, Any]]) -> list[np.ndarray]:
        """Of windows: which of the words that may count have a token in every view, bool [words]
        each."""
        found = [row["counted"].copy() for row in rows]
        questions, words = ([row[name] for row in rows] for name in ("question", "words"))
        for tokenizer in self._tokenizers:
            encoded = encode_words(tokenizer, words, self._max_length, questions)
            for number, here in enumerate(found):
                here &= first_tokens(encoded, number, len(here), of_pair=True) != NO_TOKEN
        return found


def question_words(
    tokenizers: Sequence[PreTrainedTokenizerBase], question: str, max_length: int
) -> tuple[list[str], list[int]]:
    """As many words of a question as half of `max_length` holds in every view, and by tokenizer the
    tokens that there is room for behind it."""
    words = [question[start:end] for start, end in words_of(question)]
    sums = [np.cumsum(token_counts(tokenizer, [words])[0]) for tokenizer in tokenizers]
    kept = min(int(np.searchsorted(of_one, max_length // 2, side="right")) for of_one in sums)
    rooms = [
        max_length - tokenizer.num_special_tokens_to_add(pair=True) - int(of_one[:kept][-1:].sum())
        for tokenizer, of_one in zip(tokenizers, sums, strict=True)
    ]
    return words[:kept], rooms


def owners(windows: Sequence[tuple[int, int]], total: int) -> np.ndarray:
    """The number of the window where each word has most around it, of equals the first: int64
    [total]."""
    owner, most = np.zeros(total, dtype=np.int64), np.full(total, -1)
    for number, (first, end) in enumerate(windows):
        here = room(first, end, total)
        better = here > most[first:end]
        owner[first:end][better], most[first:end][better] = number, here[better]
    return owner
