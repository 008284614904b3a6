"""The windows in which models read a list of words, or the words of a question's context, that are
too long for one view.

A window is some of the words in their order, behind the question's where there is one: from there
on an example like any other, found by its own content key. It is as long as every tokenizer of the
recipe allows, so that the same words are in every model's view. Windows overlap, and a word counts
in one of them: where it has most around it. `predict` reads texts in the same windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_distill.data.columns import as_numpy, flat_lists
from ds_distill.data.cutting import (
    KEYS,
    by_tokens,
    lists_of,
    made_of,
    of_whole_example,
    token_features,
    with_keys,
)
from ds_distill.data.word_tokens import Views, WordTokens, owners, ranges
from ds_distill.data.words import NO_TOKEN, Words, word_keys, words_of
from ds_distill.recipe.tags import IN_SPAN, OUTSIDE, SPAN_TAGS


@dataclass(frozen=True)
class TextWindows(Words):
    """The words of N windows of texts, R in all. A word that is in several windows is a row of
    each, and belongs to one of them; in the others it does not count."""

    text: np.ndarray
    """int64 [N]: the number of each window's text, ascending."""
    owned: np.ndarray
    """bool [R]: whether a word belongs to its window."""

    @staticmethod
    def of(split: datasets.Dataset) -> Words:
        """Of a prepared split; where each text is one window, words."""
        offsets, counted = flat_lists(split, "counted")
        text = as_numpy(split, "number")
        if len(np.unique(text)) == len(text):
            return Words(offsets, counted)
        owned = flat_lists(split, "owned")[1]
        return TextWindows(offsets, counted & owned, text, owned)

    def at(self, indices: np.ndarray) -> TextWindows:
        """Those of some windows, in ascending order; of a text all windows or none."""
        words, rows = super().at(indices), self.of_examples(indices)
        return TextWindows(words.offsets, words.counted, self.text[indices], self.owned[rows])

    @property
    def firsts(self) -> np.ndarray:
        return np.unique(self.text, return_index=True)[1]

    def of_whole_texts(self, chosen: np.ndarray) -> np.ndarray:
        return ~np.isin(self.text, self.text[~chosen])

    def whole(self) -> tuple[np.ndarray, Words]:
        rows = np.flatnonzero(self.owned)  # in the order of the texts and of their words
        _, of_window = np.unique(self.text, return_inverse=True)
        lengths = np.bincount(of_window[self.examples[rows]], minlength=len(self.firsts))
        return rows, Words(np.concatenate([[0], np.cumsum(lengths)]), self.counted[rows])


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
        question = as_numpy(split, "number")
        per_window, begins = flat_lists(split, "answer_starts")
        of_answer = np.repeat(question, np.diff(per_window))
        answers = np.stack([of_answer, begins, flat_lists(split, "answer_ends")[1]], axis=1)
        return ContextWords(
            offsets,
            counted,
            question,
            as_numpy(split, "first"),
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


class WordCutter:
    """Cuts lists of words, or those of contexts behind their questions', into windows for some
    tokenizers."""

    def __init__(
        self,
        tokenizers: Sequence[PreTrainedTokenizerBase],
        max_length: int,
        *,
        pairs: bool = False,
    ) -> None:
        self._tokenizers, self._most_asked = by_tokens(tokenizers), max_length // 2
        self._views = [
            Views(tokenizer, max_length, pairs=pairs) for tokenizer in self._tokenizers.values()
        ]
        self.features: dict[str, Any] = {
            **lists_of({"words": "string", "owned": "bool", "counted": "bool"}),
            **lists_of({"question": "string"} if pairs else {}),
            **dict.fromkeys(("number", "first"), datasets.Value("int64")),
            **token_features(self._tokenizers, of_words=True, pairs=pairs),
        }
        """Of the rows of `windows`."""

    def windows(
        self,
        lists: Sequence[list[str]],
        numbers: Sequence[int],
        questions: Sequence[list[str]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Windows that cover each list of words: its `number`; the number of the window's `first`
        word in it; its `words`, those of the `question` as far as half of `max_length` holds them
        in every view; of each word whether it is `owned`: belongs to this window; and `counted`:
        has a token in the view of every model, on which teachers and student meet, whatever their
        tokenizers are; and each tokenizer's tokens, see `token_features`."""
        of_questions: Sequence[Any] = [None] * len(lists)
        if questions is not None:
            of_questions = self._tokens(questions)
        for at, (tokens, asked) in enumerate(zip(self._tokens(lists), of_questions, strict=True)):
            rooms = [views.room for views in self._views]
            row: dict[str, Any] = {"number": numbers[at]}
            of_question: Sequence[WordTokens | None] = [None] * len(tokens)
            if questions is not None:
                kept = min(
                    int(np.searchsorted(one.offsets[1:], self._most_asked, side="right"))
                    for one in asked
                )
                of_question = [one.first(kept) for one in asked]
                rooms = [room - one.offsets[kept] for room, one in zip(rooms, asked, strict=True)]
                row["question"] = questions[at][:kept]
            found = list(ranges([one.offsets for one in tokens], rooms))
            owner = owners(found, len(lists[at]))
            for number, (first, end) in enumerate(found):
                every = [
                    views.of_words(of_one, of_asked, first, end)
                    for views, of_one, of_asked in zip(
                        self._views, tokens, of_question, strict=True
                    )
                ]
                yield {
                    **row,
                    "first": first,
                    "words": lists[at][first:end],
                    "owned": owner[first:end] == number,
                    "counted": np.all([v["first_tokens"] != NO_TOKEN for v in every], axis=0),
                    **{
                        f"{fingerprint}:{name}": values
                        for fingerprint, view in zip(self._tokenizers, every, strict=True)
                        for name, values in view.items()
                    },
                }

    def _tokens(self, lists: Sequence[list[str]]) -> list[tuple[WordTokens, ...]]:
        """Of each list its tokens, by tokenizer."""
        every = (WordTokens.of_lists(one, lists) for one in self._tokenizers.values())
        return list(zip(*every, strict=True))


def prepare(
    examples: datasets.Dataset,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    max_length: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each list of words as windows of at most `max_length` tokens in every model's view.

    examples: columns as of `words.EXAMPLES`, and marks. file: where it is written.

    The result has these, the marks as the whole list has them, what `WordCutter.windows` gives, and
    `whole_hi`, `whole_lo`: the whole list's content key.
    """
    cutter = WordCutter(tokenizers, max_length)

    def windows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        rows = []
        for window in cutter.windows(batch["words"], numbers):
            at, first = window["number"] - numbers[0], window["first"]
            row = {name: values[at] for name, values in batch.items()}
            row |= {"whole_hi": row["key_hi"], "whole_lo": row["key_lo"]}
            row["label"] = row["label"][first : first + len(window["words"])]
            rows.append(row | window)
        return with_keys(rows, word_keys([row["words"] for row in rows]))

    whole = dict.fromkeys(("whole_hi", "whole_lo"), datasets.Value("int64"))
    features = {**examples.features, **whole, **cutter.features}
    return made_of(examples, windows, features, "cuts long texts into windows", file)


def prepare_contexts(
    examples: datasets.Dataset,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    max_length: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each question with each window of its context: at most `max_length` tokens together in every
    model's view.

    examples: columns as of `questions.EXAMPLES`, and marks. file: where it is written.

    The result has what `WordCutter.windows` gives, keys, and marks; `label`: of each word whether
    one of its characters is in an answer (the class ids of `SPAN_TAGS`), -1 where answers are not
    known; `counted`: whether it counts here; `starts` and `ends`: its characters in the context;
    and `answer_starts` and `answer_ends`: of a context's first window, the right answers.
    """
    cutter = WordCutter(tokenizers, max_length, pairs=True)
    of_whole = of_whole_example(examples)

    def windows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        asked = [texts_of(question, words_of(question)) for question in batch["text"]]
        spans = [words_of(context) for context in batch["text_b"]]
        words = [texts_of(*of_one) for of_one in zip(batch["text_b"], spans, strict=True)]
        contexts = [_context(*of_one) for of_one in zip(spans, batch["answers"], strict=True)]
        rows = []
        for window in cutter.windows(words, numbers, asked):
            at, first = window["number"] - numbers[0], window["first"]
            here = slice(first, first + len(window["words"]))
            row = {name: batch[name][at] for name in of_whole}
            row |= {name: values[here] for name, values in contexts[at].items()}
            row |= _answers(batch["answers"][at] if first == 0 else None)
            rows.append({**row, **window, "counted": window["counted"] & window["owned"]})
        return with_keys(rows, word_keys([[row["question"], row["words"]] for row in rows]))

    numbers = dict.fromkeys(("starts", "ends", "answer_starts", "answer_ends"), "int32")
    features = {**lists_of({"label": "int16", **numbers}), **KEYS, **of_whole, **cutter.features}
    return made_of(examples, windows, features, "cuts contexts into windows", file)


def texts_of(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """The words that stand at some characters of a text."""
    return [text[start:end] for start, end in spans]


def _context(
    spans: list[tuple[int, int]], answers: list[dict[str, Any]] | None
) -> dict[str, np.ndarray]:
    """`label`, `starts` and `ends` of a context's words; see `prepare`."""
    starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    label = np.full(len(spans), -1 if answers is None else SPAN_TAGS.index(OUTSIDE))
    given = _answers(answers)
    for begin, stop in zip(given["answer_starts"], given["answer_ends"], strict=True):
        label[(starts < stop) & (begin < ends)] = SPAN_TAGS.index(IN_SPAN)
    return {"label": label, "starts": starts, "ends": ends}


def _answers(answers: list[dict[str, Any]] | None) -> dict[str, list[int]]:
    starts = [answer["start"] for answer in answers or ()]
    ends = [answer["start"] + len(answer["text"]) for answer in answers or ()]
    return {"answer_starts": starts, "answer_ends": ends}
