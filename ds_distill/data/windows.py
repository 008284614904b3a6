"""Cut long texts, lists of words and contexts of questions into windows that models can read whole.

A window is a range of characters or words, with the question before it where there is one: from
there on an example like any other, found by its own text, so a cache of it does not depend on a
tokenizer. It ends between words, and it is as long as every tokenizer allows, so that the same is
in every model's view. `predict` reads texts in the same windows.
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
from ds_distill.data.groups import of_whole_example
from ds_distill.data.tokenise import (
    KEYS,
    by_tokens,
    lists_of,
    made_of,
    token_features,
    with_keys,
)
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.data.word_tokens import (
    NO_WORDS,
    TextCutter,
    TextTokens,
    Views,
    WordTokens,
    owners,
    ranges,
)
from ds_distill.data.words import NO_TOKEN, texts_of, word_keys, words_of
from ds_distill.keys import content_keys
from ds_distill.recipe.tags import IN_SPAN, OUTSIDE, SPAN_TAGS

NO_ANSWER = 0
"""The class of the first token, which stands for `no answer in this window`. Those from 1 on are
the tokens of the context."""

_CUTS = "cuts long texts into windows"
"""What is done, for those who wait."""


def split_long(
    examples: datasets.Dataset,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    max_length: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each text as windows that have at most `max_length` tokens, special tokens included, by all
    tokenizers. A text that fits stays as it is.

    examples: columns `text`, `label`, `key_hi`, `key_lo`, `copy` and `group`. The result has these,
    the last two as the whole text has them, and each tokenizer's tokens, see `token_features`. A
    word that is longer than a window is cut inside. file: where it is written.

    Raises ValueError for pairs of texts.
    """
    if "text_b" in examples.column_names:
        raise ValueError("pairs of texts cannot be cut into windows")
    chosen = by_tokens(tokenizers)
    cutter = TextCutter([*chosen.values()])
    views = [Views(tokenizer, max_length) for tokenizer in chosen.values()]
    rooms = [of_one.room for of_one in views]
    kept = {"label": datasets.Value("int64"), **of_whole_example(examples)}

    def windows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        rows = []
        for at, tokens in enumerate(cutter.tokens(batch["text"])):
            text, whole = batch["text"][at], {name: batch[name][at] for name in kept}
            for start, end, found in cutter.windows(text, tokens, rooms):
                row = {"text": text[start:end], **whole}
                for name, view, of_one in zip(chosen, views, found, strict=True):
                    row[f"{name}:input_ids"] = view.view(of_one.ids)[0]["input_ids"]
                rows.append(row)
        return with_keys(rows, content_keys([row["text"] for row in rows]))

    features = {
        "text": datasets.Value("string"),
        **kept,
        **KEYS,
        **token_features(chosen, of_words=False, pairs=False),
    }
    return made_of(examples, windows, features, _CUTS, file)


# ------------------------------------------------------------------------------------------- words


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
        no_question = [NO_WORDS] * len(self._views)
        of_questions = [no_question] * len(lists) if questions is None else self._tokens(questions)
        for at, (tokens, asked) in enumerate(zip(self._tokens(lists), of_questions, strict=True)):
            kept = min(
                int(np.searchsorted(one.offsets[1:], self._most_asked, side="right"))
                for one in asked
            )
            of_each = [
                (views, of_text, of_question.first(kept))
                for views, of_text, of_question in zip(self._views, tokens, asked, strict=True)
            ]
            rooms = [views.room - len(of_question.ids) for views, _, of_question in of_each]
            found = list(ranges([of_text.offsets for of_text in tokens], rooms))
            owner = owners(found, len(lists[at]))
            for number, (first, end) in enumerate(found):
                every = [
                    views.of_words(of_text, of_question, first, end)
                    for views, of_text, of_question in of_each
                ]
                yield {
                    "number": numbers[at],
                    "question": questions[at][:kept] if questions else [],
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

    def _tokens(self, lists: Sequence[list[str]]) -> list[list[WordTokens]]:
        """Of each list its tokens, by tokenizer."""
        every = (WordTokens.of_lists(one, lists) for one in self._tokenizers.values())
        return list(map(list, zip(*every, strict=True)))


def word_windows(
    examples: datasets.Dataset,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    max_length: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each list of words, or question with its context, as windows of at most `max_length` tokens
    in every model's view.

    examples: columns as of `columns.WORDS` or `columns.QUESTIONS`, and marks. file: where it is
        written.

    The result has what `WordCutter.windows` gives; keys, and `whole_hi` and `whole_lo`, the whole
    example's; what else is the same of it in each window; and `label`, of each word. Of contexts
    that is whether one of its characters is in an answer (the class ids of `SPAN_TAGS`), -1 where
    answers are not known; there are `starts` and `ends`, of each word its characters in the
    context, and `answer_starts` and `answer_ends`, of a context's first window the right answers.
    """
    pairs = "answers" in examples.column_names
    cutter, of_whole = WordCutter(tokenizers, max_length, pairs=pairs), of_whole_example(examples)
    places = ("starts", "ends", "answer_starts", "answer_ends") if pairs else ()

    def windows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        asked = None
        if not pairs:
            lists, of_words = batch["words"], [{"label": of} for of in batch["label"]]
        else:
            asked = [texts_of(question, words_of(question)) for question in batch["text"]]
            spans = [words_of(context) for context in batch["text_b"]]
            lists = [texts_of(*of_one) for of_one in zip(batch["text_b"], spans, strict=True)]
            of_words = [_context(*of_one) for of_one in zip(spans, batch["answers"], strict=True)]
        rows = []
        for window in cutter.windows(lists, numbers, asked):
            at, first = window["number"] - numbers[0], window["first"]
            here = slice(first, first + len(window["words"]))
            row = {name: batch[name][at] for name in of_whole}
            row |= {"whole_hi": batch["key_hi"][at], "whole_lo": batch["key_lo"][at]}
            row |= {name: values[here] for name, values in of_words[at].items()}
            row |= _answers(batch["answers"][at] if first == 0 else None) if pairs else {}
            rows.append(row | window)
        read = ([row["question"], row["words"]] if pairs else row["words"] for row in rows)
        return with_keys(rows, word_keys([*read]))

    features = {
        **lists_of({"label": "int16", **dict.fromkeys(places, "int32")}),
        **KEYS,
        **{f"whole_{half}": KEYS[f"key_{half}"] for half in ("hi", "lo")},
        **of_whole,
        **cutter.features,
    }
    return made_of(examples, windows, features, _CUTS, file)


def _context(
    spans: list[tuple[int, int]], answers: list[dict[str, Any]] | None
) -> dict[str, np.ndarray]:
    """`label`, `starts` and `ends` of a context's words; see `word_windows`."""
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


# --------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Windows:
    """The windows of a split's questions: N of them."""

    table: datasets.Dataset
    """See `question_windows`; mapped into memory."""
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


def question_windows(
    examples: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlap: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each question with each window of its context: at most `max_length` tokens together, of which
    a question has no more than half.

    examples: columns as of `columns.QUESTIONS`, and marks.
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
    return made_of(examples, windows, features, _CUTS, file)


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

    at: the window's first character. spans: of its tokens; see `question_windows`.
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
