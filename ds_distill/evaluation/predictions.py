"""What models predict of a split's examples, as metrics read it: one type for each `Over`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy.special import expit, logsumexp, softmax
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import IOB2, Entities

from ds_distill.data.columns import flat_lists
from ds_distill.errors import UserError
from ds_distill.process.activity import marked
from ds_distill.recipe.metrics.classes import bin_of
from ds_distill.recipe.tags import IN_SPAN, OUTSIDE, are_entities, entity_types, type_of

if TYPE_CHECKING:
    from ds_distill.data.batches import Units

DENSE_CLASSES = 100
"""With more classes a report has the confusion matrix's counts that are not 0 alone."""

RELIABILITY_BINS = 15
"""Of the figure of reliability: as many as the calibration error has by default."""


@dataclass(frozen=True)
class Predictions:
    """Of N examples, one model's."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Its fields, as a run keeps them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        """N."""
        raise NotImplementedError

    def numbers(self) -> dict[str, int]:
        """How many examples there are, and what else is counted."""
        return {"examples": len(self)}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        """What a report has beside metrics, by class and by confidence.

        names: of the task's classes.
        """
        counts = self.class_counts(names)
        return {"per_class": self.by_class(counts), "class_counts": counts} if counts else {}

    def class_counts(self, names: Sequence[str]) -> dict[str, list[int]]:
        """By class, label or type how many are right, are predicted, are there."""
        return {}

    @staticmethod
    def by_class(counts: Mapping[str, Sequence[int]]) -> dict[str, float | None]:
        """The F1 of each of these; None of one that is not there."""
        return {
            name: 2 * right / (predicted + there) if there else None
            for name, (right, predicted, there) in counts.items()
        }

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        """What `arrays` gave; labels: names of the task's classes."""
        return cls(**arrays)


@dataclass(frozen=True)
class ClassPredictions(Predictions):
    """Of N labelled examples with one of C classes each."""

    logits: np.ndarray
    """float [N, C]."""
    labels: np.ndarray
    """int64 [N], 0 or more."""

    @staticmethod
    def labelled(logits: np.ndarray, labels: np.ndarray) -> ClassPredictions:
        """Of the labelled ones among all examples; labels: int [N], -1 unlabelled."""
        known = labels >= 0
        return ClassPredictions(logits[known], labels[known])

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def predicted(self) -> np.ndarray:
        """int64 [N]: the class with the largest logit, of equals the first."""
        return self.logits.argmax(axis=1)

    @cached_property
    def confidence(self) -> np.ndarray:
        """float64 [N]: the probability of that class."""
        return softmax(self.logits.astype(np.float64), axis=1).max(axis=1)

    def right_counts(self) -> np.ndarray:
        """Whether each example is right, and 1: float64 [N, 2]."""
        right = self.predicted == self.labels
        return np.stack([right, np.ones_like(right)], axis=1).astype(np.float64)

    def class_counts(self, names: Sequence[str]) -> dict[str, list[int]]:
        right = self.labels[self.predicted == self.labels]
        of_each = (right, self.predicted, self.labels)
        counts = np.stack([np.bincount(some, minlength=len(names)) for some in of_each])
        return dict(zip(names, counts.T.tolist(), strict=True))

    @staticmethod
    def by_class(counts: Mapping[str, Sequence[int]]) -> dict[str, float | None]:
        """The accuracy on the examples of each class (its recall); None without any."""
        return {
            name: right / there if there else None for name, (right, _, there) in counts.items()
        }

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        bins = reliability(self.confidence, self.predicted == self.labels)
        confusion = confusion_counts(self, len(names))
        return {**super().details(names), "confusion": confusion, "reliability": bins}

    def indicators(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [N, C] each: which class is predicted, and which is the label."""
        classes = np.arange(self.logits.shape[1])
        return self.predicted[:, None] == classes, self.labels[:, None] == classes

    def scores_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 [N] that rises with the probability of a class (its log odds), and bool [N]:
        where it is the label."""
        logits = self.logits.astype(np.float64)
        others = logsumexp(np.delete(logits, index, axis=1), axis=1)
        return logits[:, index] - others, self.labels == index


@dataclass(frozen=True)
class LabelPredictions(Predictions):
    """Of N examples with any number of L labels each. A label is predicted where its logit is above
    0."""

    logits: np.ndarray
    """float [N, L]."""
    labels: np.ndarray
    """int64 [N, L] of 0 and 1; -1 where it is not known: that label of that example is left out."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def predicted(self) -> np.ndarray:
        """int64 [N, L]: 1 where a label is predicted."""
        return (self.logits > 0).astype(np.int64)

    def class_counts(self, names: Sequence[str]) -> dict[str, list[int]]:
        predicted, there = self.indicators()
        counts = np.stack([part.sum(axis=0) for part in (predicted & there, predicted, there)])
        return dict(zip(names, counts.T.tolist(), strict=True))

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        """Confidence is the probability of each label of each example, which is right where the
        label is there."""
        known = self.labels >= 0
        probabilities = expit(self.logits[known].astype(np.float64))
        bins = reliability(probabilities, self.labels[known] == 1)
        return {**super().details(names), "reliability": bins}

    def indicators(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [N, L] each: which labels are predicted, and which are there."""
        return (self.logits > 0) & (self.labels >= 0), self.labels == 1


@dataclass(frozen=True)
class TokenScores(Predictions):
    """How a masked-LM does on each of N examples. All float64 [N]."""

    loss: np.ndarray
    """Sum of the cross-entropies of its masked tokens, of those that all models know."""
    right: np.ndarray
    """How many of them have the largest logit."""
    tokens: np.ndarray
    """How many they are."""
    own: np.ndarray | None = None
    """Of a model that knows more tokens, float64 [3, N]: these three of all that it knows."""
    word_loss: np.ndarray | None = None
    """Sum of the cross-entropies of the hidden words; see `WordLoss`. None where they were not
    asked."""
    words: np.ndarray | None = None
    """How many words are hidden, the same ones for all models."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in super().arrays().items() if array is not None}

    def __len__(self) -> int:
        return len(self.tokens)

    def numbers(self) -> dict[str, int]:
        """Raises UserError where no token is masked."""
        tokens = int(self.tokens.sum())
        if tokens == 0:
            raise UserError(
                "a split has no token that is masked, so there is nothing to measure: its texts "
                "are too few or too short for task.masking.rate. Add texts to it, or raise the "
                "rate."
            )
        return {"examples": len(self), "tokens": tokens}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        return {} if self.words is None else {"hidden_words": int(self.words.sum())}

    def right_counts(self) -> np.ndarray:
        """How many masked tokens are right, and how many there are: float64 [N, 2]."""
        return np.stack([self.right, self.tokens], axis=1).astype(np.float64)

    @property
    def of_own(self) -> TokenScores | None:
        """On all tokens that it knows; None where all models know them."""
        return None if self.own is None else TokenScores(*self.own)


@dataclass(frozen=True)
class NumberPredictions(Predictions):
    """Of N examples whose label is a number."""

    predicted: np.ndarray
    """float64 [N]."""
    labels: np.ndarray
    """float64 [N], finite."""

    def __len__(self) -> int:
        return len(self.labels)


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Numbers of examples, true classes by predicted: int64 [C, C].

    labels, predicted: class ids, int [N].
    """
    found = np.bincount(labels * classes + predicted, minlength=classes**2)
    return found.reshape(classes, classes)


def confusion_counts(
    predictions: ClassPredictions, classes: int
) -> list[list[int]] | dict[str, list[int]]:
    """The confusion matrix as JSON: rows of counts, true classes by predicted. With more than
    DENSE_CLASSES classes nearly all are 0, and it is the others alone: `true`, `predicted` (class
    ids) and `count`, one element for each."""
    labels, predicted = predictions.labels, predictions.predicted
    if classes <= DENSE_CLASSES:
        dense: list[list[int]] = confusion_matrix(labels, predicted, classes).tolist()
        return dense
    cells, counts = np.unique(labels * classes + predicted, return_counts=True)
    rows, columns = np.divmod(cells, classes)
    return {"true": rows.tolist(), "predicted": columns.tolist(), "count": counts.tolist()}


def reliability(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Of each bin of confidence that holds a prediction: the mean confidence, the accuracy, and how
    many predictions it holds.

    confidence: float64 [N], probabilities. right: bool [N].
    """
    bins = bin_of(confidence, RELIABILITY_BINS)
    return [
        {
            "confidence": float(confidence[here].mean()),
            "accuracy": float(right[here].mean()),
            "count": int(here.sum()),
        }
        for here in (bins == number for number in np.unique(bins))
    ]


Entity = tuple[str, int, int]
"""Type, first word and last word, in its example."""


@dataclass(frozen=True)
class TagPredictions(Predictions):
    """Of N labelled lists of words with one of C tags each."""

    logits: np.ndarray
    """float [R, C]. Those of words that do not count are not read."""
    labels: np.ndarray
    """int64 [R], 0 or more."""
    offsets: np.ndarray
    """int64 [N + 1]: the first word of each list, and R."""
    counted: np.ndarray
    """bool [R], see `Units`."""
    tags: Sequence[str]

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: of for name, of in super().arrays().items() if name != "tags"}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        return cls(**arrays, tags=list(labels))

    def __len__(self) -> int:
        """N: examples are resampled whole, because the words of one are not independent."""
        return len(self.offsets) - 1

    def numbers(self) -> dict[str, int]:
        without_token = int((~self.counted).sum())
        words = {"words": len(self.labels), "words_without_token": without_token}
        return {"examples": len(self), **words}

    def details(self, names: Sequence[str]) -> dict[str, Any]:
        """Confidence is of the words that count."""
        right = (self.predicted == self.labels)[self.counted]
        bins = reliability(self.confidence[self.counted], right)
        return {**super().details(names), "reliability": bins}

    @cached_property
    def predicted(self) -> np.ndarray:
        """int64 [R]: the tag with the largest logit. A word that does not count is predicted O; -1
        where there is no such tag."""
        otherwise = self.tags.index(OUTSIDE) if OUTSIDE in self.tags else -1
        return np.where(self.counted, self.logits.argmax(axis=1), otherwise)

    @cached_property
    def confidence(self) -> np.ndarray:
        """float64 [R]: the probability of that tag; 1 of a word that does not count."""
        likeliest = softmax(self.logits.astype(np.float64), axis=1).max(axis=1)
        return np.where(self.counted, likeliest, 1.0)

    @property
    def examples(self) -> np.ndarray:
        """int64 [R]: the example of each word."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def types(self) -> list[str]:
        """The T entity types; of tags that are none of entities, the tags but O."""
        return entity_types(self.tags)

    def of_examples(self, values: np.ndarray) -> np.ndarray:
        """The sums of the words' values, [R] or [R, K], over each example: float64 [N, ...]."""
        summed = np.zeros((len(self), *values.shape[1:]))
        np.add.at(summed, self.examples, values)
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
        of_examples = np.split(names, self.offsets[1:-1])
        return entities([tags.tolist() for tags in of_examples], strict=strict)

    def class_counts(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Of entities by type; of tags that are none of entities, of words."""
        of_entities = are_entities(self.tags)
        each = self.entity_counts(strict=False) if of_entities else self.word_counts()
        return dict(zip(self.types, each.sum(axis=0).T.astype(int).tolist(), strict=True))


def entities(examples: Sequence[list[str]], *, strict: bool) -> list[set[Entity]]:
    """The entities of each example's tags, by seqeval.

    strict: an entity begins with B- (IOB2). Else an I- without one before it begins one too, as
        with conlleval.
    """
    if strict:
        found = Entities(list(examples), IOB2).entities
        return [{(e.tag, e.start, e.end - 1) for e in of_one} for of_one in found]
    return [set(get_entities(tags)) for tags in examples]


@dataclass(frozen=True)
class SpanPredictions(TagPredictions):
    """Of Q labelled questions, of whose contexts each word is predicted to be in an answer or not.
    A predicted span is a run of such words, from the first one's first character to the last one's
    last. A word that counts in no window is predicted to be in none."""

    spans: np.ndarray
    """int64 [R, 2]: first character and end of each word, in its context."""
    answers: np.ndarray
    """int64 [A, 3]: the right answers: question, first character, end. They may overlap."""
    windows: int
    """In which the contexts were read."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), "windows": np.array([self.windows])}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        return super().of_arrays({**arrays, "windows": arrays["windows"].item()}, labels)

    def numbers(self) -> dict[str, int]:
        return {**super().numbers(), "windows": self.windows}

    @cached_property
    def predicted_spans(self) -> np.ndarray:
        """What is predicted: question, first character, end: int64 [P, 3], in their order."""
        rows = np.flatnonzero(self.predicted == self.tags.index(IN_SPAN))
        question = self.examples[rows]
        goes_on = (np.diff(question) == 0) & (np.diff(rows) == 1)
        begins = np.concatenate([[True], ~goes_on])[: len(rows)]
        ends = np.concatenate([~goes_on, [True]])[-len(rows) :] if len(rows) else begins
        characters = self.spans[rows]
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
        for spans in (self.predicted_spans, self.right_spans):
            np.maximum.at(lengths, spans[:, 0], spans[:, 2])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        predicted, there = (
            _covered(spans, offsets) for spans in (self.predicted_spans, self.right_spans)
        )
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
        predicted, there = (
            {*map(tuple, s.tolist())} for s in (self.predicted_spans, self.right_spans)
        )
        counts = np.zeros((len(self), 3))
        for sort, some in enumerate((predicted & there, predicted, there)):
            for question, _, _ in some:
                counts[question, sort] += 1
        return counts

    def class_counts(self, names: Sequence[str]) -> dict[str, list[int]]:
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


def word_predictions(logits: np.ndarray, units: Units, tags: Sequence[str]) -> TagPredictions:
    """What is predicted of texts, or of contexts of questions, by the rows of their windows.

    logits: float [R, C]; units: all windows of each, which have labels.
    """
    rows, offsets = units.whole()
    every = logits[rows], units.labels[rows], offsets, units.counted[rows], tags
    if not units.has_answers:
        return TagPredictions(*every)
    answers, begins, spans = span_columns(units)
    question = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
    return SpanPredictions(*every, spans, np.column_stack([question, answers]), len(units))


def span_columns(units: Units) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the windows of T contexts: first character and end of the right answers, int64 [A, 2]; the
    number of each context's first one, and A: int64 [T + 1]; and of each word, int64 [W, 2]."""
    stored, firsts = units.stored(), np.flatnonzero(units.is_first)

    def characters(starts: str, ends: str) -> np.ndarray:
        both = [flat_lists(stored, name)[1] for name in (starts, ends)]
        return np.stack(both, axis=1).astype(np.int64)

    begins = flat_lists(stored, "answer_starts")[0][[*firsts, -1]]
    spans = characters("starts", "ends")[units.whole()[0]]
    return characters("answer_starts", "answer_ends"), begins, spans


def class_log_shares(labels: np.ndarray, classes: int) -> np.ndarray:
    """The logarithm of the share of each class: float64 [C], -inf of a class that is not there.

    labels: int [N], -1 unlabelled (left out).
    """
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    with np.errstate(divide="ignore"):
        shares: np.ndarray = np.log(counts / counts.sum())
    return shares


@dataclass(frozen=True)
class Unigram:
    """Each token as likely as it is frequent in the training text, whatever stands around it."""

    token: int
    """The most frequent one, which it always answers."""
    log_probs: np.ndarray
    """float64 [V]; of special tokens, which are never masked, -inf."""

    @staticmethod
    def of(counts: np.ndarray, special_ids: tuple[int, ...]) -> Unigram:
        """counts: int64 [V], each token's in the training text; one is added to each, so that one
        that does not stand there is not impossible."""
        counts = counts.astype(np.float64) + 1.0
        counts[list(special_ids)] = 0.0
        with np.errstate(divide="ignore"):
            return Unigram(int(counts.argmax()), np.log(counts / counts.sum()))

    def score(self, masked: np.ndarray, example: np.ndarray, examples: int) -> TokenScores:
        """masked: the true ids of n masked tokens, int [n]; example: the number of the example of
        each, int [n], below `examples`."""
        sums = partial(np.bincount, example, minlength=examples)
        right = (masked == self.token).astype(np.float64)
        return TokenScores(sums(-self.log_probs[masked]), sums(right), sums().astype(np.float64))
