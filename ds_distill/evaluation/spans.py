"""Spans of characters that models find in contexts, and how many are right.

Shapes: Q questions, R words of their contexts in all, P spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from ds_distill.data.words import Words
from ds_distill.evaluation.words import TagPredictions
from ds_distill.recipe.tags import IN_SPAN


@dataclass(frozen=True)
class SpanPredictions(TagPredictions):
    """Of Q labelled questions, of whose contexts each word is predicted to be in an answer or not.
    A predicted span is a run of such words, from the first one's first character to the last one's
    last. A word that counts in no window is predicted to be in none."""

    spans_of_words: np.ndarray
    """int64 [R, 2]: first character and end of each word, in its context."""
    answers: np.ndarray
    """int64 [A, 3]: the right answers: question, first character, end. They may overlap."""
    windows: int
    """In which the contexts were read."""

    def arrays(self) -> dict[str, np.ndarray]:
        own = {"spans": self.spans_of_words, "answers": self.answers}
        return {**super().arrays(), **own, "windows": np.array([self.windows])}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        words = Words(arrays["offsets"], arrays["counted"])
        own = arrays["spans"], arrays["answers"], arrays["windows"].item()
        return cls(arrays["logits"], arrays["labels"], words, list(labels), *own)

    def numbers(self) -> dict[str, int]:
        return {**super().numbers(), "windows": self.windows}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        return self.of_confidence()

    @cached_property
    def spans(self) -> np.ndarray:
        """What is predicted: question, first character, end: int64 [P, 3], in their order."""
        rows = np.flatnonzero(self.predicted == self.tags.index(IN_SPAN))
        question = self.words.examples[rows]
        goes_on = (np.diff(question) == 0) & (np.diff(rows) == 1)
        begins = np.concatenate([[True], ~goes_on])[: len(rows)]
        ends = np.concatenate([~goes_on, [True]])[-len(rows) :] if len(rows) else begins
        characters = self.spans_of_words[rows]
        return np.stack([question[begins], characters[begins, 0], characters[ends, 1]], axis=1)

    @cached_property
    def right_spans(self) -> np.ndarray:
        """The right answers, each once."""
        return np.unique(self.answers, axis=0)

    @cached_property
    def character_counts(self) -> np.ndarray:
        """How many characters of each context are right (in an answer and in a predicted span),
        predicted, there: float64 [Q, 3]. A character counts once, however many spans it is in."""
        lengths = np.zeros(len(self), dtype=np.int64)
        for spans in (self.spans, self.right_spans):
            np.maximum.at(lengths, spans[:, 0], spans[:, 2])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        predicted, there = (_covered(spans, offsets) for spans in (self.spans, self.right_spans))
        of_question = np.repeat(np.arange(len(self)), lengths)
        return np.stack(
            [
                np.bincount(of_question, weights=marked, minlength=len(self))
                for marked in (predicted & there, predicted, there)
            ],
            axis=1,
        )

    @cached_property
    def span_counts(self) -> np.ndarray:
        """How many spans of each context are right, predicted, there: float64 [Q, 3]. Right are
        those whose both ends are."""
        predicted, there = ({*map(tuple, s.tolist())} for s in (self.spans, self.right_spans))
        counts = np.zeros((len(self), 3))
        for sort, some in enumerate((predicted & there, predicted, there)):
            for question, _, _ in some:
                counts[question, sort] += 1
        return counts

    def per_class(self, names: Sequence[str]) -> dict[str, float | None]:
        """Nothing: there is one kind of span, and its F1 is a metric."""
        return {}


def _covered(spans: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Which of the characters of all contexts, one behind the other, are in a span: bool [...].

    spans: int64 [P, 3]. offsets: int64 [Q + 1], where each context begins.
    """
    steps = np.zeros(offsets[-1] + 1, dtype=np.int64)
    np.add.at(steps, offsets[spans[:, 0]] + spans[:, 1], 1)
    np.add.at(steps, offsets[spans[:, 0]] + spans[:, 2], -1)
    return steps.cumsum()[:-1] > 0


def word_predictions(
    logits: np.ndarray, labels: np.ndarray, words: Words, tags: Sequence[str]
) -> TagPredictions:
    """What is predicted of texts, or of contexts of questions, by the rows of their windows.

    logits: float [R, C]; labels: int64 [R], 0 or more; words: of the windows.
    """
    own, whole = words.whole()
    if whole.spans is None or whole.answers is None or whole.answer_offsets is None:
        return TagPredictions(logits[own], labels[own], whole, tags)
    question = np.repeat(np.arange(len(whole)), np.diff(whole.answer_offsets))
    answers = np.column_stack([question, whole.answers])
    of_contexts = whole.spans, answers, len(words)
    return SpanPredictions(logits[own], labels[own], whole, tags, *of_contexts)
