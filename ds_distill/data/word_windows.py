"""The windows of words in which models read the context of a question that has any number of
answers.

A window is some of the context's words in their order, behind the question's: from there on an
example like any list of words, found by its own content key. It is as long as every tokenizer of
the recipe allows, so that the same words are in every model's view. Windows overlap, and a word
counts in one of them: where it has most around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_distill.data.columns import as_numpy, flat_lists
from ds_distill.data.cutting import cut, lists_of, of_whole_example
from ds_distill.data.tokenizer import tokenizer_fingerprint
from ds_distill.data.word_tokens import WindowViews
from ds_distill.data.words import Words, word_keys, words_of
from ds_distill.process.activity import mark
from ds_distill.recipe.tags import IN_SPAN, OUTSIDE, SPAN_TAGS

VERSION = "windows of words 3"
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


def prepare(
    examples: datasets.Dataset, tokenizers: list[PreTrainedTokenizerBase], max_length: int
) -> datasets.Dataset:
    """Each question with each window of its context: at most `max_length` tokens together in every
    model's view. A question that is longer than half of that in some view is cut.

    examples: columns as of `questions.EXAMPLES`, and marks.

    The result has `question` and `words`, lists of words; keys of both, and marks; `label`: of
    each word whether one of its characters is in an answer (the class ids of `SPAN_TAGS`), -1 where
    answers are not known; `counted`: whether it counts here; `starts` and `ends`: its characters in
    the context; `number`: the question's; `first`: the number of the first word in the context;
    `answer_starts` and `answer_ends`: of a context's first window, the right answers; and each
    tokenizer's tokens, see `cutting`.
    """
    cutter = WindowViews(tokenizers, max_length, pairs=True)

    of_whole = of_whole_example(examples)

    def windows(batch: dict[str, list[Any]], numbers: list[int]) -> list[dict[str, Any]]:
        mark("cuts contexts into windows", done=len(numbers))
        asked = [texts_of(question, words_of(question)) for question in batch["text"]]
        spans = [words_of(context) for context in batch["text_b"]]
        words = [texts_of(*of_one) for of_one in zip(batch["text_b"], spans, strict=True)]
        tokens = zip(cutter.tokens(asked), cutter.tokens(words), strict=True)
        rows = []
        for at, (of_question, of_context) in enumerate(tokens):
            kept = cutter.kept(of_question)
            question = [of_one.first(kept) for of_one in of_question]
            context = _context(spans[at], batch["answers"][at])
            for first, end, owned, views in cutter.windows(of_context, question):
                row = {
                    **{name: values[first:end] for name, values in context.items()},
                    **cutter.columns(views),
                    **{name: batch[name][at] for name in of_whole},
                    "question": asked[at][:kept],
                    "words": words[at][first:end],
                    "number": numbers[at],
                    "first": first,
                    **_answers(batch["answers"][at] if first == 0 else None),
                }
                rows.append({**row, "counted": row["counted"] & owned})
        keys = word_keys([[row["question"], row["words"]] for row in rows])
        for row, (high, low) in zip(rows, keys, strict=True):
            row.update(key_hi=high, key_lo=low)
        return rows

    state = [VERSION, max_length, *map(tokenizer_fingerprint, tokenizers)]
    return cut(examples, windows, {**_FEATURES, **of_whole, **cutter.features}, state, _AT_ONCE)


_FEATURES = {
    **lists_of(dict.fromkeys(("question", "words"), "string")),
    **lists_of({"label": "int16"}),
    **{name: datasets.Value("int64") for name in ("key_hi", "key_lo", "number")},
    "first": datasets.Value("int32"),
    **lists_of(dict.fromkeys(("starts", "ends", "answer_starts", "answer_ends"), "int32")),
}


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
