"""Spans of characters that models find in contexts, and how many are right.

Shapes: Q questions, N windows of their contexts, R words of these in all, P spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from ds_distill.data.word_windows import ContextWords
from ds_distill.evaluation.words import TagPredictions
from ds_distill.recipe.tags import IN_SPAN


@dataclass(frozen=True)
class SpanPredictions(TagPredictions):
    """Of Q labelled questions, of whose contexts each word is predicted to be in an answer or not.
    A predicted span is a run of such words, from the first one's first character to the last one's
    last. A word that counts in no window is predicted to be in none."""

    words: ContextWords

    def arrays(self) -> dict[str, np.ndarray]:
        return {"logits": self.logits, "labels": self.labels, **asdict(self.words)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        of_words = {name: a for name, a in arrays.items() if name not in ("logits", "labels")}
        return cls(arrays["logits"], arrays["labels"], ContextWords(**of_words), list(labels))

    def __len__(self) -> int:
        """Q: the windows of a context are not independent, and are resampled together."""
        return len(self.words.firsts)

    def numbers(self) -> dict[str, int]:
        words = self.words
        of_words = {
            "words": int(words.counted.sum()) + words.lost,
            "words_without_token": words.lost,
        }
        return {"examples": len(self), "windows": len(words), **of_words}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        return self.of_confidence()

    @cached_property
    def spans(self) -> np.ndarray:
        """What is predicted: question (its position among those here), first character, end: int64
        [P, 3], in their order."""
        words = self.words
        rows = words.rows[self.predicted[words.rows] == self.tags.index(IN_SPAN)]
        question, number = words.question_of[rows], words.numbers[rows]
        goes_on = (np.diff(question) == 0) & (np.diff(number) == 1)
        begins = np.concatenate([[True], ~goes_on])[: len(rows)]
        ends = np.concatenate([~goes_on, [True]])[-len(rows) :] if len(rows) else begins
        first, last = rows[begins], rows[ends]
        spans = [words.question_of[first], words.spans[first, 0], words.spans[last, 1]]
        return np.stack(spans, axis=1)

    @cached_property
    def right_spans(self) -> np.ndarray:
        """The right answers alike, each once: int64 [A, 3]."""
        question = np.unique(self.words.question)
        position = np.searchsorted(question, self.words.answers[:, 0])
        return np.unique(np.column_stack([position, self.words.answers[:, 1:]]), axis=0)

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
