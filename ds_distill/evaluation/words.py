"""What models predict of words, as tags; entities made of tags, and how many are right.

Shapes: N examples of R words in all, C tags, T entity types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from scipy.special import softmax
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import IOB2, Entities

from ds_distill.data.words import Words
from ds_distill.evaluation.predictions import Predictions, reliability
from ds_distill.process.activity import marked
from ds_distill.recipe.metrics.metric import f1
from ds_distill.recipe.tags import OUTSIDE, are_entities, entity_types, type_of

Entity = tuple[str, int, int]
"""Type, first word and last word, in its example."""


@dataclass(frozen=True)
class TagPredictions(Predictions):
    """Of N labelled lists of words with one of C tags each."""

    logits: np.ndarray
    """float [R, C]. Those of words that do not count are not read."""
    labels: np.ndarray
    """int64 [R], 0 or more."""
    words: Words
    tags: Sequence[str]

    def arrays(self) -> dict[str, np.ndarray]:
        words = {"offsets": self.words.offsets, "counted": self.words.counted}
        return {"logits": self.logits, "labels": self.labels, **words}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        words = Words(arrays["offsets"], arrays["counted"])
        return cls(arrays["logits"], arrays["labels"], words, list(labels))

    def __len__(self) -> int:
        """N: examples are resampled whole, because the words of one are not independent."""
        return len(self.words)

    def numbers(self) -> dict[str, int]:
        without_token = int((~self.words.counted).sum())
        words = {"words": len(self.labels), "words_without_token": without_token}
        return {"examples": len(self), **words}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            "per_class": self.per_class(names),
            "class_counts": self.class_counts(names),
            **self.of_confidence(),
        }

    def of_confidence(self) -> dict[str, Any]:
        """Of the words that count."""
        counted = self.words.counted
        right = (self.predicted == self.labels)[counted]
        return {"reliability": reliability(self.confidence[counted], right)}

    @cached_property
    def predicted(self) -> np.ndarray:
        """int64 [R]: the tag with the largest logit. A word that does not count is predicted O; -1
        where there is no such tag."""
        otherwise = self.tags.index(OUTSIDE) if OUTSIDE in self.tags else -1
        return np.where(self.words.counted, self.logits.argmax(axis=1), otherwise)

    @cached_property
    def confidence(self) -> np.ndarray:
        """float64 [R]: the probability of that tag; 1 of a word that does not count."""
        likeliest = softmax(self.logits.astype(np.float64), axis=1).max(axis=1)
        return np.where(self.words.counted, likeliest, 1.0)

    @cached_property
    def types(self) -> list[str]:
        """The T entity types; of tags that are none of entities, the tags but O."""
        return entity_types(self.tags)

    def of_examples(self, values: np.ndarray) -> np.ndarray:
        """The sums of the words' values, [R] or [R, K], over each example: float64 [N, ...]."""
        summed = np.zeros((len(self), *values.shape[1:]))
        np.add.at(summed, self.words.examples, values)
        return summed

    def right_counts(self) -> np.ndarray:
        """How many words are right, and how many there are: float64 [N, 2]."""
        right = self.predicted == self.labels
        return self.of_examples(np.stack([right, np.ones_like(right)], axis=1))

    def word_counts(self) -> np.ndarray:
        """How many words of each type are right (of it and predicted to be), predicted, there:
        float64 [N, 3, T]."""
        numbers = {name: number for number, name in enumerate(self.types)}
        of_tag = np.array([numbers.get(type_of(tag), -1) for tag in self.tags] + [-1])
        of_type = np.arange(len(self.types))
        predicted = of_tag[self.predicted][:, None] == of_type
        there = of_tag[self.labels][:, None] == of_type
        return self.of_examples(np.stack([predicted & there, predicted, there], axis=1))

    def entity_counts(self, *, strict: bool) -> np.ndarray:
        """How many entities of each type are right (type and both ends), predicted, there: float64
        [N, 3, T]; see `entities`."""
        numbers = {name: number for number, name in enumerate(self.types)}
        counts = np.zeros((len(self), 3, len(self.types)))
        found = (self._entities(values, strict) for values in (self.predicted, self.labels))
        pairs = marked("counts entities", zip(*found, strict=True))
        for example, (predicted, there) in enumerate(pairs):
            for sort, some in enumerate((predicted & there, predicted, there)):
                for entity in some:
                    counts[example, sort, numbers[entity[0]]] += 1
        return counts

    def _entities(self, tags: np.ndarray, strict: bool) -> list[set[Entity]]:
        names = np.array([*self.tags, OUTSIDE], dtype=object)[tags]  # -1 is the last one
        of_examples = np.split(names, self.words.offsets[1:-1])
        return entities([tags.tolist() for tags in of_examples], strict=strict)

    @cached_property
    def type_counts(self) -> np.ndarray:
        """How many entities of each type are right, predicted, there: float64 [3, T]; of tags that
        are none of entities, words."""
        of_entities = are_entities(self.tags)
        each = self.entity_counts(strict=False) if of_entities else self.word_counts()
        found: np.ndarray = each.sum(axis=0)
        return found

    def per_class(self, names: Sequence[str]) -> dict[str, float | None]:
        """The F1 of the entities of each type; None of one that is not there. Of tags that are none
        of entities, the F1 of the words with each tag."""
        values = f1(*self.type_counts)
        return {
            name: float(values[number]) if self.type_counts[2, number] else None
            for number, name in enumerate(self.types)
        }

    def class_counts(self, names: Sequence[str]) -> dict[str, list[int]]:
        """`type_counts` by type."""
        return dict(zip(self.types, self.type_counts.T.astype(int).tolist(), strict=True))


def entities(examples: Sequence[list[str]], *, strict: bool) -> list[set[Entity]]:
    """The entities of each example's tags, by seqeval.

    strict: an entity begins with B- (IOB2). Else an I- without one before it begins one too, as
        with conlleval.
    """
    if strict:
        found = Entities(list(examples), IOB2).entities
        return [{(e.tag, e.start, e.end - 1) for e in of_one} for of_one in found]
    return [set(get_entities(tags)) for tags in examples]
