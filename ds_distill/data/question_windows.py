"""The windows in which models read the context of a question, and where tokens stand in it.

A window is a range of the context's characters, from there on an example like any other: the pair
of the question and that text, found by its own content key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_distill.data.columns import as_numpy
from ds_distill.data.cutting import (
    KEYS,
    lists_of,
    made_of,
    of_whole_example,
    token_features,
    with_keys,
)
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.data.word_tokens import TextCutter, TextTokens, Views
from ds_distill.keys import content_keys

NO_ANSWER = 0
"""The class of the first token, which stands for `no answer in this window`. Those from 1 on are
the tokens of the context."""


@dataclass(frozen=True)
class Windows:
    """The windows of a split's questions: N of them."""

    table: datasets.Dataset
    """See `prepare`; mapped into memory."""
    first: np.ndarray
    """int64 [N]: the position of the first token of the context in each."""
    tokens: np.ndarray
    """int64 [N]: how many tokens of the context it has."""
    question: np.ndarray
    """int64 [N]: the number of its question in the split."""

    @staticmethod
    def of(split: datasets.Dataset) -> Windows:
        """Of a prepared split."""
        return Windows(split, *(as_numpy(split, name) for name in ("first", "tokens", "question")))

    def at(self, indices: np.ndarray) -> Windows:
        """Some of them."""
        return Windows(
            self.table.select(indices),
            self.first[indices],
            self.tokens[indices],
            self.question[indices],
        )

    @property
    def candidates(self) -> np.ndarray:
        """The positions of the tokens that may be the start or the end of an answer, by class:
        int64 [N, K], K - 1 the tokens of the longest context, -1 where one is shorter."""
        number = np.arange(1 + self.tokens.max(initial=0))
        positions = np.where(number == NO_ANSWER, 0, self.first[:, None] + number - 1)
        return np.where(number <= self.tokens[:, None], positions, -1)

    @property
    def firsts(self) -> np.ndarray:
        """The first window of each question, in the order of the windows: int64 [Q]."""
        return np.sort(np.unique(self.question, return_index=True)[1])


_FEATURES = {
    **{name: datasets.Value("string") for name in ("text", "text_b")},
    **{name: datasets.Value("int64") for name in ("question", "at")},
    **{name: datasets.Value("int16") for name in ("first", "tokens")},
    **lists_of({"label": "int16", "begins": "int32", "ends": "int32", "answers": "string"}),
    **KEYS,
}


def prepare(
    examples: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlap: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each question with each window of its context: at most `max_length` tokens together, of which
    a question has no more than half.

    examples: columns as of `examples.QUESTIONS`, and marks.
    overlap: tokens that windows share, at most. file: where it is written.

    The result has `text`, `text_b`, keys and marks as any pairs, and `label`: the classes of the
    first and last token of the first right answer that the window holds whole, NO_ANSWER where it
    holds none, -1 where answers are not known; `question`: its number; `at`: the window's first
    character in the context; `first` and `tokens`: position of the context's first token, and how
    many it has; `begins` and `ends`: the characters of each, in the window; `answers`: all right
    answers to the question; and the tokens of the pair, see `token_features`.
    """
    views = Views(tokenizer, max_length, pairs=True)
    cutter, fingerprint = TextCutter([tokenizer]), tokens_fingerprint(tokenizer)
    of_whole = of_whole_example(examples)

    def windows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        rows = []
        both = zip(cutter.tokens(batch["text"]), cutter.tokens(batch["text_b"]), strict=True)
        for at, ([of_question], of_context) in enumerate(both):
            question, of_question = _asked(cutter, batch["text"][at], of_question, max_length // 2)
            answers = batch["answers"][at]
            whole = {
                **{name: batch[name][at] for name in of_whole},
                "question": numbers[at],
                "text": question,
                "answers": None if answers is None else [answer["text"] for answer in answers],
            }
            rooms = [views.room - len(of_question.ids)]
            found = cutter.windows(batch["text_b"][at], of_context, rooms, overlap)
            for start, text, tokens in _new(batch["text_b"][at], found):
                read, first, kept = views.view(tokens.ids, of_question.ids)
                spans = _trimmed(text, tokens.spans[kept])
                row = {
                    "text_b": text,
                    "at": start,
                    "first": first,
                    "tokens": len(spans),
                    "begins": spans[:, 0],
                    "ends": spans[:, 1],
                    "label": _label(start, text, spans, answers),
                }
                row |= {f"{fingerprint}:{name}": values for name, values in read.items()}
                rows.append({**whole, **row})
        texts = ([row[name] for row in rows] for name in ("text", "text_b"))
        return with_keys(rows, content_keys(*texts))

    tokens = token_features([fingerprint], of_words=False, pairs=True)
    features = {**_FEATURES, **of_whole, **tokens}
    return made_of(examples, windows, features, "cuts contexts into windows", file)


def _asked(
    cutter: TextCutter, question: str, tokens: TextTokens, most: int
) -> tuple[str, TextTokens]:
    """As much of a question as has at most so many tokens, and these."""
    while len(tokens.ids) > most:
        question = question[: min(int(tokens.spans[most - 1, 1]), len(question) - 1)]
        [[tokens]] = cutter.tokens([question])
    return question, tokens


def _new(
    context: str, windows: Iterator[tuple[int, int, list[TextTokens]]]
) -> Iterator[tuple[int, str, TextTokens]]:
    """The windows of a context that hold more than those before them: first character, text and
    tokens; one of no text, where there is none."""
    reached, text = 0, ""
    for start, end, [tokens] in windows:
        text = context[start:end]
        # Some tokenizers make tokens of white space.
        if (end > reached and text.strip()) or (start, end) == (0, len(context)):
            reached = max(1, end)
            yield start, text, tokens
    if not reached:
        yield 0, "", TextTokens(tokens.ids[:0], tokens.spans[:0])


def _label(
    at: int, text: str, spans: np.ndarray, answers: list[dict[str, Any]] | None
) -> list[int]:
    """The classes of the first and last token of the first answer that a window holds whole.

    at: the window's first character. spans: of its tokens; see `prepare`.
    """
    if answers is None:
        return [-1, -1]
    for answer in answers:
        start = answer["start"] - at
        end = start + len(answer["text"])
        if start < 0 or end > len(text):
            continue
        first, last = spans.T
        here = np.flatnonzero((last > start) & (first < end) & (first < last))
        if len(here):  # a tokenizer may drop all of an answer's characters
            return [1 + int(here[0]), 1 + int(here[-1])]
    return [NO_ANSWER, NO_ANSWER]


def _trimmed(text: str, spans: np.ndarray) -> np.ndarray:
    """Tokens without the white space that some tokenizers count to them."""
    black = np.array([at for at, letter in enumerate(text) if not letter.isspace()], dtype=np.int64)
    first, after = np.searchsorted(black, spans[:, 0]), np.searchsorted(black, spans[:, 1])
    if not len(black):
        return spans[:, [1, 1]]
    begins = np.where(first < after, black[first.clip(max=len(black) - 1)], spans[:, 1])
    ends = np.where(first < after, black[after - 1] + 1, spans[:, 1])
    return np.stack([begins, ends], axis=1)
