"""Cut long texts, lists of words and contexts of questions into windows that models can read whole.

A window is a range of characters or words, with the question before it where there is one: from
there on an example like any other, found by its own text, so a cache of it does not depend on a
tokenizer. It ends between words, and it is as long as every tokenizer allows, so that the same is
in every model's view. `predict` reads texts in the same windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_distill.data.groups import of_whole_example
from ds_distill.data.spans import texts_of, word_keys, words_of
from ds_distill.data.tokenise import by_tokens, lists_of, made_of, of_tokenizers, token_features
from ds_distill.data.word_tokens import (
    NO_TOKEN,
    NO_WORDS,
    TextCutter,
    TextTokens,
    Views,
    WordTokens,
    owners,
    ranges,
)
from ds_distill.keys import content_keys
from ds_distill.recipe.tags import IN_SPAN, OUTSIDE, SPAN_TAGS

NO_ANSWER = 0
"""The class of the first token, which stands for `no answer in this window`. Those from 1 on are
the tokens of the context."""

Batch = Mapping[str, list[Any]]
Row = dict[str, Any]


def _units(
    examples: datasets.Dataset,
    cut: Callable[[Batch], Iterable[Iterable[Row]]],
    keys: Callable[[list[Row]], np.ndarray],
    features: Mapping[str, Any],
    file: Path | None,
) -> datasets.Dataset:
    """Units of examples, as `Units` reads them, in a file or in memory.

    cut: makes the windows of each example of a batch: `label`, of each row; `owned` and `counted`,
        see `Units`, where not all rows are; `first`, the number of its first word or character in
        the example; and what `features` has. keys: of windows their content keys, int64 [n, 2].

    Each has besides the `number` of its example, the two halves of its content key and of the whole
    example's, and what else is the same of all windows of an example.
    """
    of_whole = of_whole_example(examples)
    halves = {"whole_hi": "key_hi", "whole_lo": "key_lo"}
    halves = {name: of for name, of in halves.items() if of in examples.column_names}

    def rows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[Row]:
        found = []
        for at, windows in enumerate(cut(batch)):
            whole = {name: batch[name][at] for name in of_whole}
            whole |= {name: batch[of][at] for name, of in halves.items()}
            for window in windows:
                every = [True] * len(window["label"])
                unit = {"owned": every, "counted": every, "number": numbers[at]}
                found.append({**whole, **unit, **window})
        for row, (high, low) in zip(found, keys(found).tolist(), strict=True):
            row.update(key_hi=high, key_lo=low)
        return found

    numbers = dict.fromkeys(("key_hi", "key_lo", "number", "first", *halves), "int64")
    every = {
        **lists_of({"label": "int16", "owned": "bool", "counted": "bool"}),
        **{name: datasets.Value(kind) for name, kind in numbers.items()},
    }
    what = "cuts long texts into windows"
    return made_of(examples, rows, {**every, **of_whole, **features}, what, file)


def split_long(
    examples: datasets.Dataset,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    max_length: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each text as windows that have at most `max_length` tokens, special tokens included, by all
    tokenizers. A text that fits stays as it is.

    examples: column `text`, keys and marks. The result has units, their `text` and each tokenizer's
    tokens, see `token_features`. A word that is longer than a window is cut inside. file: where it
    is written.

    Raises ValueError for pairs of texts.
    """
    if "text_b" in examples.column_names:
        raise ValueError("pairs of texts cannot be cut into windows")
    chosen = by_tokens(tokenizers)
    cutter = TextCutter([*chosen.values()])
    views = {name: Views(tokenizer, max_length) for name, tokenizer in chosen.items()}
    rooms = [view.room for view in views.values()]

    def windows(text: str, tokens: list[TextTokens]) -> Iterator[Row]:
        for start, end, found in cutter.windows(text, tokens, rooms):
            read = (view.view(one.ids)[0] for view, one in zip(views.values(), found, strict=True))
            window = {"label": [-1], "first": start, "text": text[start:end]}
            yield window | of_tokenizers(views, read)

    def cut(batch: Batch) -> Iterator[Iterator[Row]]:
        return map(windows, batch["text"], cutter.tokens(batch["text"]))

    def keys(rows: list[Row]) -> np.ndarray:
        return content_keys([row["text"] for row in rows])

    features = {"text": datasets.Value("string"), **token_features(chosen, "input_ids")}
    return _units(examples, cut, keys, features, file)


# ------------------------------------------------------------------------------------------- words


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

    The result has units with a row for each of their `words`. It counts where it has a token in the
    view of every model, on which teachers and student meet, whatever their tokenizers are. It has
    the words of the `question` as far as half of `max_length` holds them in every view, and each
    tokenizer's tokens, see `token_features`. Of contexts `label` is whether one of a word's
    characters is in an answer (the class ids of `SPAN_TAGS`), -1 where answers are not known; there
    are `starts` and `ends`, of each word its characters in the context, and `answer_starts` and
    `answer_ends`, of a context's first window the right answers.
    """
    pairs, chosen = "answers" in examples.column_names, by_tokens(tokenizers)
    views = {name: Views(one, max_length, pairs=pairs) for name, one in chosen.items()}
    windows = partial(_windows_of_words, views, max_length // 2)

    def tokens(lists: Sequence[list[str]]) -> Iterator[tuple[WordTokens, ...]]:
        """Of each list its tokens, by tokenizer."""
        return zip(*(WordTokens.of_lists(one, lists) for one in chosen.values()), strict=True)

    def cut(batch: Batch) -> Iterator[Iterator[Row]]:
        of_words, of_first = zip(*(_contexts if pairs else _lists)(batch), strict=True)
        texts = tokens([of_one["words"] for of_one in of_words])
        if not pairs:
            return map(
                windows, of_words, of_first, texts, repeat([]), repeat([NO_WORDS] * len(views))
            )
        questions = [texts_of(question, words_of(question)) for question in batch["text"]]
        return map(windows, of_words, of_first, texts, questions, tokens(questions))

    def keys(rows: list[Row]) -> np.ndarray:
        read = ([row["question"], row["words"]] if pairs else row["words"] for row in rows)
        return word_keys([*read])

    texts, of_pairs = ["words", *["question"] * pairs], ["token_type_ids"] * pairs
    places = ["starts", "ends", "answer_starts", "answer_ends"] * pairs
    columns = lists_of({**dict.fromkeys(texts, "string"), **dict.fromkeys(places, "int32")})
    read = token_features(chosen, "input_ids", *of_pairs, "places", "token_counts")
    return _units(examples, cut, keys, {**columns, **read}, file)


def _windows_of_words(
    views: Mapping[str, Views],
    most_asked: int,
    of_words: Row,
    of_first: Row,
    text: Sequence[WordTokens],
    question: list[str],
    asked: Sequence[WordTokens],
) -> Iterator[Row]:
    """Of one list. of_words: values of each word; of_first: of the first window alone. text, asked:
    by tokenizer, tokens of the list and of its question."""
    lasts = (of_one.offsets[1:] for of_one in asked)
    kept = min(int(np.searchsorted(last, most_asked, side="right")) for last in lasts)
    asked = [of_one.first(kept) for of_one in asked]
    each = [*zip(views.values(), text, asked, strict=True)]
    rooms = [view.room - len(of_question.ids) for view, _, of_question in each]
    found = list(ranges([of_one.offsets for of_one in text], rooms))
    owner = owners(found, len(of_words["words"]))
    for number, (first, end) in enumerate(found):
        every = [view.of_words(one, other, first, end) for view, one, other in each]
        yield {
            **{name: values[first:end] for name, values in of_words.items()},
            **{name: [] if first else values for name, values in of_first.items()},
            **{"question": question[:kept], "first": first},
            "owned": owner[first:end] == number,
            "counted": np.all([one["places"] != NO_TOKEN for one in every], axis=0),
            **of_tokenizers(views, every),
        }


def _lists(batch: Batch) -> Iterator[tuple[Row, Row]]:
    """Of each list of words values of each word; and of its first window alone."""
    for words, label in zip(batch["words"], batch["label"], strict=True):
        yield {"words": words, "label": label}, {}


def _contexts(batch: Batch) -> Iterator[tuple[Row, Row]]:
    """The same of contexts; see `word_windows`."""
    for context, answers in zip(batch["text_b"], batch["answers"], strict=True):
        spans = words_of(context)
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        label = np.full(len(spans), -1 if answers is None else SPAN_TAGS.index(OUTSIDE))
        begins = [answer["start"] for answer in answers or ()]
        stops = [answer["start"] + len(answer["text"]) for answer in answers or ()]
        for begin, stop in zip(begins, stops, strict=True):
            label[(starts < stop) & (begin < ends)] = SPAN_TAGS.index(IN_SPAN)
        words = {"words": texts_of(context, spans), "label": label, "starts": starts, "ends": ends}
        yield words, {"answer_starts": begins, "answer_ends": stops}


# --------------------------------------------------------------------------------------- questions


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

    The result has units with two rows, whose labels are the classes of the first and last token of
    the first right answer that the window holds whole, NO_ANSWER where it holds none, -1 where
    answers are not known; `text`, `text_b`; `begins` and `ends`: the characters of each token of
    the context, in the window; `answers`: all right answers to the question; and the tokens of the
    pair, see `token_features`.
    """
    views = Views(tokenizer, max_length, pairs=True)
    cutter, chosen = TextCutter([tokenizer]), by_tokens([tokenizer])

    def windows(row: Row, of_question: TextTokens, of_context: list[TextTokens]) -> Iterator[Row]:
        question, of_question = _asked(cutter, row["text"], of_question, max_length // 2)
        context, answers = row["text_b"], row["answers"]
        right = None if answers is None else [answer["text"] for answer in answers]
        room = views.room - len(of_question.ids)
        found = cutter.windows(context, of_context, [room], overlap)
        for start, text, tokens in _new(context, found):
            read, first, kept = views.view(tokens.ids, of_question.ids)
            spans = _trimmed(text, tokens.spans[kept])
            read["candidates"] = np.concatenate([[0], np.arange(first, first + len(spans))])
            yield {
                **{"text": question, "text_b": text, "answers": right, "first": start},
                **{"begins": spans[:, 0], "ends": spans[:, 1]},
                "label": _label(start, text, spans, answers),
                **of_tokenizers(chosen, [read]),
            }

    def cut(batch: Batch) -> Iterator[Iterator[Row]]:
        names = ("text", "text_b", "answers")
        rows = (
            dict(zip(names, values, strict=True))
            for values in zip(*(batch[name] for name in names), strict=True)
        )
        questions = (of_one for [of_one] in cutter.tokens(batch["text"]))
        return map(windows, rows, questions, cutter.tokens(batch["text_b"]))

    def keys(rows: list[Row]) -> np.ndarray:
        return content_keys(*([row[name] for row in rows] for name in ("text", "text_b")))

    features = {
        **dict.fromkeys(("text", "text_b"), datasets.Value("string")),
        **lists_of({"begins": "int32", "ends": "int32", "answers": "string"}),
        **token_features(chosen, "input_ids", "token_type_ids", "candidates"),
    }
    return _units(examples, cut, keys, features, file)


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
