"""The windows in which models read a list of words, or the words of a question's context, that are
too long for one view.

A window is some of the words in their order, behind the question's where there is one: from there
on an example like any other, found by its own content key. It is as long as every tokenizer of the
recipe allows, so that the same words are in every model's view. Windows overlap, and a word counts
in one of them: where it has most around it. `predict` reads texts in the same windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

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
from ds_distill.data.words import NO_TOKEN, texts_of, word_keys, words_of
from ds_distill.recipe.tags import IN_SPAN, OUTSIDE, SPAN_TAGS


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
    """Each list of words, or question with its context, as windows of at most `max_length` tokens
    in every model's view.

    examples: columns as of `examples.WORDS` or `examples.QUESTIONS`, and marks. file: where it is
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
    return made_of(examples, windows, features, "cuts long texts into windows", file)


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
