"""The windows in which models read the context of a question, and where tokens stand in it.

A window is a range of the context's characters, from there on an example like any other: the pair
of the question and that text, found by its own content key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ds_distill.data.columns import as_numpy
from ds_distill.data.cutting import column_of, cut, lists_of, of_whole_example, token_columns
from ds_distill.data.tokenizer import tokenizer_fingerprint, tokens_fingerprint
from ds_distill.keys import content_keys
from ds_distill.process.activity import mark

VERSION = 4
"""Part of the fingerprint: raise it when the same contexts give other windows."""

NO_ANSWER = 0
"""The class of the first token, which stands for `no answer in this window`. Those from 1 on are
the tokens of the context."""

_AT_ONCE = 200


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
    **{name: datasets.Value("int64") for name in ("key_hi", "key_lo", "question", "at")},
    **{name: datasets.Value("int16") for name in ("first", "tokens")},
    **lists_of({"label": "int16", "begins": "int32", "ends": "int32", "answers": "string"}),
}


def prepare(
    examples: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlap: int,
) -> datasets.Dataset:
    """Each question with each window of its context: at most `max_length` tokens together.

    examples: columns as of `questions.EXAMPLES`, and marks.
    overlap: tokens that windows share, at most.

    The result has `text`, `text_b`, keys and marks as any pairs, and `label`: the classes of the
    first and last token of the first right answer that the window holds whole, NO_ANSWER where it
    holds none, -1 where answers are not known; `question`: its number; `at`: the window's first
    character in the context; `first` and `tokens`: position of the context's first token, and how
    many it has; `begins` and `ends`: the characters of each, in the window; `answers`: all right
    answers to the question; and the tokens of the pair, see `cutting`.
    """
    cutter = _Cutter(tokenizer, max_length, overlap)
    fingerprint = tokens_fingerprint(tokenizer)
    tokens = token_columns(fingerprint, of_words=False, pairs=True)

    of_whole = of_whole_example(examples)

    def windows(batch: dict[str, list[Any]], numbers: list[int]) -> list[dict[str, Any]]:
        mark("cuts contexts into windows", done=len(numbers))
        found = cutter.windows(batch["text"], batch["text_b"])
        rows = []
        for at, of_question in enumerate(found):
            answers = batch["answers"][at]
            for window in of_question:
                rows.append(
                    {
                        "text": window.question,
                        "text_b": window.text,
                        "label": [-1, -1] if answers is None else window.label(answers),
                        **{name: batch[name][at] for name in of_whole},
                        "question": numbers[at],
                        "at": window.at,
                        "first": window.first,
                        "tokens": len(window.spans),
                        "begins": window.spans[:, 0],
                        "ends": window.spans[:, 1],
                        "answers": None if answers is None else [a["text"] for a in answers],
                        **{name: window.encoded[column_of(name)] for name in tokens},
                    }
                )
        keys = content_keys([row["text"] for row in rows], [row["text_b"] for row in rows])
        for row, (high, low) in zip(rows, keys, strict=True):
            row.update(key_hi=high, key_lo=low)
        return rows

    state = [VERSION, max_length, overlap, tokenizer_fingerprint(tokenizer)]
    return cut(examples, windows, {**_FEATURES, **of_whole, **lists_of(tokens)}, state, _AT_ONCE)


@dataclass(frozen=True)
class _Window:
    question: str
    text: str
    at: int
    first: int
    spans: np.ndarray
    """int64 [tokens, 2]: first character and end of each token of the context, in the window."""

    encoded: dict[str, list[int]]
    """Its tokens: `input_ids` and `token_type_ids`."""

    def label(self, answers: list[dict[str, Any]]) -> list[int]:
        """The classes of the first and last token of the first answer that it holds whole."""
        for answer in answers:
            start = answer["start"] - self.at
            end = start + len(answer["text"])
            if start < 0 or end > len(self.text):
                continue
            first, last = self.spans.T
            here = np.flatnonzero((last > start) & (first < end) & (first < last))
            if len(here):  # a tokenizer may drop all of an answer's characters
                return [1 + int(here[0]), 1 + int(here[-1])]
        return [NO_ANSWER, NO_ANSWER]


class _Cutter:
    """Cuts contexts into windows. Cuts are at white space, else between tokens; each window is
    tokenised as it will be, because a text that is cut may have other tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, overlap: int) -> None:
        self._tokenizer, self._max_length, self._overlap = tokenizer, max_length, overlap
        self._special = tokenizer.num_special_tokens_to_add(pair=True)

    def windows(
        self, questions: Sequence[str], contexts: Sequence[str]
    ) -> Iterator[Iterator[_Window]]:
        """The windows of each context, one or more, with the question as far as it is read."""
        encoded = self._encode(questions, contexts)
        for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
            whole = _window(question, context, 0, encoded, number)
            length = encoded.sequence_ids(number).count(0)
            tokens = len(whole.encoded["input_ids"])
            if tokens <= self._max_length and length <= self._max_length // 2:
                yield iter([whole])
            else:
                yield self._cut(whole, length)

    def _cut(self, uncut: _Window, length: int) -> Iterator[_Window]:
        """length: tokens of the question."""
        question, context, spans = uncut.question, uncut.text, uncut.spans
        if length > self._max_length // 2:
            question, length = self._question(question)
            if (whole := self._window(question, context, 0)) is not None:
                yield whole
                return
        room = self._max_length - self._special - length
        begins = _cuts(context, spans, room)
        first, reached = 0, 0  # numbers of cuts: where a window begins, where the last one ends
        while first < len(begins) - 1:
            end = int(np.searchsorted(begins, begins[first] + room, side="right")) - 1
            end = max(end, first + 1)
            window = self._between(question, spans, context, begins[first], begins[end])
            while window is None and end > first + 1:
                end -= 1
                window = self._between(question, spans, context, begins[first], begins[end])
            # What is between two cuts alone may be too long for a window: none has it. It may also
            # be white space, of which some tokenizers make tokens.
            if window is not None and window.text.strip() and end > reached:
                reached = end
                yield window
            if end == len(begins) - 1:
                break
            back = int(np.searchsorted(begins, begins[end] - self._overlap, side="left"))
            first = max(first + 1, min(back, end))
        if not reached and (nothing := self._window(question, "", 0)) is not None:
            yield nothing

    def _question(self, question: str) -> tuple[str, int]:
        """As much of a question as half of `max_length` holds, and its tokens."""
        while True:
            spans = self._spans(question)
            if len(spans) <= self._max_length // 2:
                return question, len(spans)
            until = int(spans[self._max_length // 2 - 1, 1])
            question = question[: min(until, len(question) - 1)]

    def _spans(self, text: str) -> np.ndarray:
        """First character and end of each token, without special tokens: int64 [tokens, 2]."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)

    def _between(
        self, question: str, spans: np.ndarray, context: str, first: int, end: int
    ) -> _Window | None:
        """The window from a token of the context up to another."""
        start = int(spans[first, 0])
        return self._window(question, context[start : int(spans[end - 1, 1])], start)

    def _window(self, question: str, text: str, start: int) -> _Window | None:
        """The window with a text that stands from a character of the context on; None where it is
        too long."""
        encoded = self._encode([question], [text])
        if len(encoded["input_ids"][0]) > self._max_length:
            return None
        return _window(question, text, start, encoded, 0)

    def _encode(self, questions: Sequence[str], texts: Sequence[str]) -> BatchEncoding:
        return self._tokenizer(
            list(questions),
            list(texts),
            return_offsets_mapping=True,
            return_token_type_ids=True,
            verbose=False,
        )


def _window(question: str, text: str, start: int, encoded: BatchEncoding, number: int) -> _Window:
    """The window that is tokenised as `number` of some."""
    here = [at for at, part in enumerate(encoded.sequence_ids(number)) if part == 1]
    tokens = {name: encoded[name][number] for name in ("input_ids", "token_type_ids")}
    spans = np.array(encoded["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)[here]
    first = here[0] if here else len(tokens["input_ids"]) - 1
    return _Window(question, text, start, first, _trimmed(text, spans), tokens)


def _trimmed(text: str, spans: np.ndarray) -> np.ndarray:
    """Tokens without the white space that some tokenizers count to them."""
    found = spans.copy()
    for number, (start, end) in enumerate(spans.tolist()):
        piece = text[start:end]
        if piece[:1].isspace() or piece[-1:].isspace():
            stripped = piece.strip()
            start = start + len(piece) - len(piece.lstrip()) if stripped else end
            found[number] = start, start + len(stripped)
    return found


def _cuts(context: str, spans: np.ndarray, room: int) -> np.ndarray:
    """Numbers of the tokens before which a context may be cut, and the number of tokens: int64 [C].

    room: the tokens of a window; between cuts at white space there may be more, and then it is cut
        before any token that shares no character with the one before it.
    """
    between = spans[1:, 0] >= spans[:-1, 1]
    blank = np.array(
        [any(map(str.isspace, context[end:start])) for (_, end), (start, _) in pairwise(spans)],
        dtype=bool,
    )
    words = np.concatenate([[0], 1 + np.flatnonzero(between & blank), [len(spans)]])
    found = [0]
    for start, end in pairwise(words.tolist()):
        if end - start > room:
            found += (1 + start + np.flatnonzero(between[start : end - 1])).tolist()
        found.append(end)
    return np.array(found, dtype=np.int64)
