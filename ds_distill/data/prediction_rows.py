"""The rows of a teacher's file of predictions, as logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_distill.data.ids import ExamplesById
from ds_distill.data.labels import LabelIds, LabelNames, LabelSets, Numbers
from ds_distill.data.readers import Reader, check_text, kind_of
from ds_distill.data.row_forms import text_columns
from ds_distill.data.sources import Source
from ds_distill.data.words import WordColumns, word_keys
from ds_distill.errors import UserError, did_you_mean
from ds_distill.keys import content_keys

LEAST = 1e-6
"""The least probability that a label has, and 1 less the most: of a label that is not named, or
said to be certain, a logarithm could not be taken."""

FORMS = ("logits", "probabilities", "predicted")
"""Columns that say what is predicted: the first of them that a file has."""

_SUM = 0.02
"""By how much probabilities that sum to 1 may be off, as rounded ones are."""


@dataclass(frozen=True)
class PredictionRow:
    location: str
    example: list[Any]
    """Its text, or the two of a pair; its words, as one; or its id."""
    logits: np.ndarray
    """float32 [k, C]: of its one row, or of each word."""


class PredictionRows:
    """A file's rows that say something. Raises UserError for a file without the columns."""

    def __init__(self, reader: Reader, source: Source, by_id: ExamplesById | None) -> None:
        """source: of the task's data, which has its columns and labels. by_id: its examples, where
        the file has the column of their ids."""
        task, present = source.task, reader.columns()
        self._reader, self._labels, self.by_id = reader, source.labels, by_id
        self.fingerprint = reader.fingerprint()
        self._names = LabelNames(source.labels)
        self._many, self.width = task.predicts == "labels", len(source.labels) or 1
        self._words = WordColumns.of(task.data.columns, present) if task.rows == "words" else None
        self.names = self._columns(source, present)
        forms = FORMS if source.labels else FORMS[-1:]
        self.form = next((form for form in forms if form in present), "")
        if not self.form:
            raise UserError(
                f"{reader.name}: no column {' or '.join(map(repr, forms))}, which says what is "
                f"predicted; it has: {', '.join(present)}. Name one so."
            )
        self._predicted: LabelIds | LabelSets | Numbers
        if not source.labels:
            self._predicted = Numbers(reader, self.form)
        else:
            kind = LabelSets if self._many else LabelIds
            self._predicted = kind(source.labels, reader, self.form, unordered=source.found_labels)

    def _columns(self, source: Source, present: list[str]) -> list[str]:
        """Those that say of which example a row is."""
        of_task, what = source.task.data.columns, "texts"
        if self.by_id is not None:
            return [str(of_task.id)]
        if self._words is not None:
            names, what = [self._words.words], "words"
        else:
            columns = text_columns(of_task, present)
            names = [columns.text] + ([columns.text_b] if columns.text_b is not None else [])
        for name in names:
            if name not in present:
                named = ""
                if of_task.id is not None:
                    named = f", and no {of_task.id!r}, in which their ids are"
                raise UserError(
                    f"{self._reader.name}: no column {name!r}, in which the task's {what} are"
                    f"{named}.{did_you_mean(name, present)} It has: {', '.join(present)}."
                )
        return names

    def keys(self, rows: list[PredictionRow]) -> tuple[np.ndarray, np.ndarray]:
        """The content keys of the examples of some rows, int64 [B, 2]; and of which the task has
        one, bool [B]: of those that are named by ids. Raises UserError for a row that is not of as
        many words."""
        columns = list(map(list, zip(*(row.example for row in rows), strict=True)))
        if self.by_id is None:
            keys = content_keys(*columns) if self._words is None else word_keys(columns[0])
            return keys, np.ones(len(rows), dtype=bool)
        at = self.by_id.find(columns[0])
        keys = np.zeros((len(rows), 2), dtype=np.int64)
        keys[at >= 0] = self.by_id.keys[at[at >= 0]]
        for row, number in zip(rows, at, strict=True):
            if number >= 0 and len(row.logits) != (words := int(self.by_id.rows[number])):
                raise _other_length(row.location, self.form, len(row.logits), words)
        return keys, at >= 0

    def __iter__(self) -> Iterator[PredictionRow]:
        """Raises UserError for the first row that says something wrong."""
        for location, row in self._reader.rows([*self.names, self.form, "confidence"]):
            example = self._example(row, location)
            value = row.get(self.form)
            if value is None or (value == "" and self._reader.numbers_are_text):
                continue
            with np.errstate(over="ignore"):  # it is refused
                logits = np.asarray(self._logits(row, value, example, location), dtype=np.float32)
            if not np.isfinite(logits).all():
                raise UserError(f"{location}: {self.form!r} holds what is no finite number.")
            yield PredictionRow(location, example, logits.reshape(-1, self.width))

    def _example(self, row: dict[str, Any], location: str) -> list[Any]:
        if self.by_id is None and self._words is not None:
            return [self._words.words_in(row, location)]
        fields = [row.get(name) for name in self.names]
        for name, field in zip(self.names, fields, strict=True):
            whole = self.by_id is not None and type(field) is int
            check_text(str(field) if whole else field, f"{location}: {name!r}")
        return list(map(str, fields))

    def _logits(self, row: dict[str, Any], value: Any, example: list[Any], location: str) -> Any:
        """[C], or of words [W, C]."""
        if self._reader.numbers_are_text and (self._words is not None or self.form != "predicted"):
            with suppress(ValueError):  # in CSV, the JSON of it
                value = json.loads(value)
        if self._words is None:
            return self._of_one(value, row.get("confidence"), location)
        values = self._by_word(self._words, row, value, location)
        if self.by_id is None and len(values) != len(example[0]):
            raise _other_length(location, self.form, len(values), len(example[0]))
        sure = row.get("confidence")
        if self._reader.numbers_are_text and sure:
            with suppress(ValueError):
                sure = json.loads(sure)
        shares = sure if isinstance(sure, list) else [sure] * len(values)
        if len(shares) != len(values):
            raise _other_length(location, "confidence", len(shares), len(values))
        of_word = enumerate(zip(values, shares, strict=True))
        return [self._of_one(*one, f"{location}: word {number}") for number, one in of_word]

    def _by_word(
        self, words: WordColumns, row: dict[str, Any], value: Any, location: str
    ) -> list[Any]:
        """What is said of each word."""
        if not isinstance(value, list):
            raise UserError(
                f"{location}: {self.form!r} must be a list of what is predicted of each word, got "
                f"{kind_of(value)}."
            )
        spans = all(isinstance(one, dict) for one in value)
        if words.in_text and self.form == "predicted" and spans:
            return replace(words, tags=self.form).tags_in(row, value, location)
        return value

    def _of_one(self, value: Any, confidence: Any, location: str) -> Any:
        """[C], of what is said of a row."""
        if self.form == "predicted":
            return self._of_predicted(value, confidence, location)
        numbers = self._by_label(value, location)
        if self.form == "logits":
            return numbers
        if ((numbers < 0) | (numbers > 1)).any():
            raise UserError(f"{location}: 'probabilities' must be from 0 to 1, got {value}.")
        if not self._many and abs(total := numbers.sum() - 1) > _SUM:
            raise UserError(
                f"{location}: 'probabilities' sum to {total + 1:.3g}, and one label is right: they "
                "must sum to 1."
            )
        return _logits_of(numbers, self._many)

    def _by_label(self, value: Any, location: str) -> np.ndarray:
        """float64 [C], from a number by label or numbers in the labels' order."""
        if isinstance(value, dict):
            given: dict[int, Any] = {}
            # A column of objects, as in parquet, has null where an object has no such key.
            for name, number in value.items():
                if (label := self._names.find(str(name))) is None:
                    raise UserError(
                        f"{location}: {self.form!r} has {name!r}, which is not one of the "
                        f"{len(self._labels)} labels: {', '.join(self._labels)}."
                        f"{did_you_mean(name, self._labels)}"
                    )
                if number is not None:
                    given[label] = number
            if self.form == "logits" and len(given) < len(self._labels):
                missing = [label for at, label in enumerate(self._labels) if at not in given]
                raise UserError(
                    f"{location}: 'logits' lacks {', '.join(missing)}. Name all labels."
                )
            listed = [given.get(label, 0.0) for label in range(len(self._labels))]
        elif isinstance(value, list) and len(value) == len(self._labels):
            listed = value
        else:
            raise UserError(
                f"{location}: {self.form!r} must be an object with a number by label, or a list "
                f"of {len(self._labels)} numbers in the labels' order, got {kind_of(value)}."
            )
        for number in listed:
            if type(number) not in (int, float):
                raise UserError(
                    f"{location}: {self.form!r} holds {kind_of(number)}. Write numbers."
                )
        try:
            return np.array(listed, dtype=np.float64)
        except OverflowError:
            raise UserError(f"{location}: {self.form!r} holds what is no finite number.") from None

    def _of_predicted(self, value: Any, confidence: Any, location: str) -> Any:
        found = self._predicted.of_value(value, location)
        if not self._labels:
            return [found]
        least = 1 / 2 if self._many else 1 / self.width
        sure = self._confidence(confidence, least, location)
        if self._many:
            return _logits_of(np.where(found == 1, sure, 1 - sure), many=True)
        if found == -1:
            raise UserError(f"{location}: 'predicted' names no label. Name one, or leave it empty.")
        probabilities = np.full(self.width, (1 - sure) / (self.width - 1))
        probabilities[int(found)] = sure
        return _logits_of(probabilities, many=False)

    def _confidence(self, value: Any, least: float, location: str) -> float:
        """least: what is no more than chance."""
        if value is None or value == "":
            return 1.0
        try:
            sure = float(value) if type(value) is not bool else np.nan
        except (TypeError, ValueError):
            sure = np.nan
        if not least < sure <= 1:
            raise UserError(
                f"{location}: 'confidence' is the probability of what is predicted, above "
                f"{least:.3g} and at most 1, got {kind_of(value)}. For others give 'probabilities'."
            )
        return sure


def _other_length(location: str, form: str, given: int, words: int) -> UserError:
    return UserError(
        f"{location}: {form!r} is of {given} words, and there are {words}. Give one for each."
    )


def _logits_of(probabilities: np.ndarray, many: bool) -> np.ndarray:
    """Of probabilities [C] of one label, or of each label's presence."""
    clipped = np.clip(probabilities, LEAST, 1 - LEAST if many else 1)
    return np.log(clipped) - np.log1p(-clipped) if many else np.log(clipped)
