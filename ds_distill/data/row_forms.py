"""What a row of a task's data is, in the columns of one file: a text or a pair of them, a list of
words, or a question about a context. Converted once to a file of examples that hold all rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ds_distill.data.columns import BATCH, QUESTIONS, WORDS, text_schema, write_columns
from ds_distill.data.groups import NAMED, named_columns
from ds_distill.data.labels import LabelIds, LabelSets, Numbers, is_labelled, label_array
from ds_distill.data.readers.base import (
    Reader,
    check_text,
    kind_of,
    name_of,
    text_of,
    value_of,
)
from ds_distill.data.spans import (
    VERSION,
    Span,
    answers_of,
    entities_of,
    parts_of,
    tagged,
    texts_of,
    word_keys,
    words_of,
)
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.process.garbage_collection import without_garbage_collection
from ds_distill.recipe.data import Columns
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import Rows, Task, key_of

_SHOWN = 3
"""Locations that are named in a message, beside the first."""

Row = Mapping[str, Any]


class RowForm(ABC):
    """The rows of one file."""

    label_key: str
    """The key of `task.data.columns` that names the labels' column."""
    labels_are = ("label", "one", "")
    """What a row has in that column, a word for it, and more that is said where only some have."""

    def __init__(self, task: Task, reader: Reader) -> None:
        self.task, self.reader = task, reader
        self.columns = text_columns(task.data.columns, reader.columns())

    @property
    def label_column(self) -> str:
        return str(getattr(self.columns, self.label_key))

    @property
    def has_labels(self) -> bool:
        """Whether the file has a column of labels."""
        return self.label_column in self.reader.columns()

    @property
    @abstractmethod
    def key_columns(self) -> dict[str, str]:
        """By key of `task.data.columns`: those of which the content key is made."""

    def tags(self) -> list[str] | None:
        """The labels, where the rows say them otherwise than one by one."""
        return None

    @abstractmethod
    def state(self, labels: list[str]) -> list[Any]:
        """What the converted rows depend on beside the file: JSON values."""

    @abstractmethod
    def begin(self, labels: list[str], *, unordered: bool) -> pa.Schema:
        """Of the examples. labels: none where the file has no column of them. unordered: as of
        `LabelIds`."""

    def fields(self, row: Row, location: str) -> list[Any]:
        """What its content key is made of. Raises UserError for a row without it."""
        return [text_of(row, name, location) for name in self.key_columns.values()]

    @abstractmethod
    def examples(self, rows: Sequence[tuple[str, Row]]) -> tuple[list[bool], list[Any]]:
        """Whether each of some rows, with their locations, has a label; and the columns of these
        examples. Raises UserError where one breaks a rule."""

    def keys(self, fields: Sequence[Sequence[Any]]) -> np.ndarray:
        """The content keys of examples, given their fields: int64 [n, 2]."""
        return content_keys(*map(list, zip(*fields, strict=True)))

    def convert(
        self, labels: list[str], path: Path, *, unordered: bool, named: Mapping[str, str]
    ) -> None:
        """Write the examples to an Arrow stream file.

        labels, unordered: as of `begin`. named: by key of `NAMED`, columns that the file has.

        Raises UserError with the location of the first invalid row.
        """
        schema = self.begin(labels, unordered=unordered)
        for key in named:
            kind = pa.string() if key == "teacher" else pa.int64()
            schema = pa.schema([*schema, *((name, kind) for name in NAMED[key])])
        wanted = [*self.key_columns.values()]
        wanted += [name for key in NAMED if (name := getattr(self.columns, key)) is not None]
        if self.task.reads_labels:
            wanted.append(self.label_column)
        rows, first = self.reader.rows(wanted), dict[bool, str]()

        def batches() -> Iterator[list[Any]]:
            while batch := list(islice(rows, BATCH)):
                labelled, columns = self.examples(batch)
                for has in (True, False):
                    if has in labelled:
                        first.setdefault(has, batch[labelled.index(has)][0])
                self._refuse_mixed(first)
                for key, name in named.items():
                    names = [name_of(row, name, key, location) for location, row in batch]
                    columns += named_columns(key, names)
                yield columns

        with without_garbage_collection():  # rows live for one batch, and hold no cycles
            count = write_columns(path, schema, batches())
        if count == 0:
            raise UserError(f"{self.reader.name}: no rows. Put at least one example there.")

    def _refuse_mixed(self, first: Mapping[bool, str]) -> None:
        """Raises UserError where some rows have labels and others have none.

        first: where the first of these, and of those, stands.
        """
        if len(first) > 1:
            what, some, advice = self.labels_are
            raise UserError(
                f"no {what} in {self.label_column!r}, but {first[True]} has {some}. Give every row "
                f"of a split {some}, or none.{advice}",
                at=first[False],
            )


class TextRows(RowForm):
    """A text, or a pair of them, with a label, any number of labels, or a number."""

    label_key = "label"
    _labels: LabelIds | LabelSets | Numbers | None = None

    @property
    def key_columns(self) -> dict[str, str]:
        texts = {"text": self.columns.text, "text_b": self.columns.text_b}
        return {key: name for key, name in texts.items() if name is not None}

    def state(self, labels: list[str]) -> list[Any]:
        class_names = self.reader.label_names(self.label_column)
        return [_named(self.columns), labels, class_names, self.task.type]

    def begin(self, labels: list[str], *, unordered: bool) -> pa.Schema:
        column = self.label_column
        if self.task.numbers and self.has_labels:
            self._labels = Numbers(self.task, self.reader, column)
        elif labels and self.task.many_labels:
            self._labels = LabelSets(self.task, labels, self.reader, column, unordered=unordered)
        elif labels:
            self._labels = LabelIds(self.task, labels, self.reader, column, unordered=unordered)
            key = key_of(self.task, "labels")
            self.labels_are = ("label", "one", f" -1 is none where {key} does not name it.")
        return text_schema(self.columns.text_b is not None, self._labels and self._labels.type)

    def examples(self, rows: Sequence[tuple[str, Row]]) -> tuple[list[bool], list[Any]]:
        texts = [
            [text_of(row, name, location) for location, row in rows]
            for name in self.key_columns.values()
        ]
        labels = np.full(len(rows), -1)
        if self._labels is not None:
            column, of_value = self.label_column, self._labels.of_value
            labels = np.array([of_value(row.get(column), location) for location, row in rows])
        keys = content_keys(*texts)
        columns = [*texts, label_array(labels), keys[:, 0], keys[:, 1]]
        return is_labelled(labels).tolist(), columns


class WordRows(RowForm):
    """A list of words with a tag for each; or a text, cut into words, with spans of it."""

    labels_are = ("tags", "some", "")

    def __init__(self, task: Task, reader: Reader) -> None:
        super().__init__(task, reader)
        named, present = task.data.columns, reader.columns()
        self.in_text = named.tokens not in present and named.text in present
        self.label_key = "spans" if self.in_text else "tags"
        self.words = named.text if self.in_text else named.tokens
        """The column of words."""
        self._ids: LabelIds | None = None
        self._lost: list[tuple[str, Span, str]] = []

    @property
    def key_columns(self) -> dict[str, str]:
        return {"tokens": self.words}

    def tags(self) -> list[str] | None:
        if not self.in_text:
            return None
        types: set[str] = set()
        for location, row in self.reader.rows([self.words, self.label_column]):
            spans = self._spans(row, row.get(self.label_column), self.label_column, location)
            types.update(kind for _, _, kind in spans)
        return [OUTSIDE, *(f"{part}-{kind}" for kind in sorted(types) for part in "BI")]

    def state(self, labels: list[str]) -> list[Any]:
        class_names = self.reader.label_names(self.label_column)
        return [_named(self.columns), labels, class_names, "words", VERSION]

    def begin(self, labels: list[str], *, unordered: bool) -> pa.Schema:
        if labels:
            self._ids = LabelIds(
                self.task, labels, self.reader, self.label_column, unordered=unordered
            )
        return WORDS

    def fields(self, row: Row, location: str) -> list[list[str]]:
        return [self._words_in(row, location)]

    def keys(self, fields: Sequence[Sequence[Any]]) -> np.ndarray:
        return word_keys([of_row for [of_row] in fields])

    def examples(self, rows: Sequence[tuple[str, Row]]) -> tuple[list[bool], list[Any]]:
        found = (self._example(row, location) for location, row in rows)
        labelled, lists, tags, widened = map(list, zip(*found, strict=True))
        keys = word_keys(lists)
        return labelled, [lists, tags, keys[:, 0], keys[:, 1], widened]

    def convert(self, *given: Any, **more: Any) -> None:
        super().convert(*given, **more)
        self._refuse_lost(self._lost, self.label_column)

    def tags_of_spans(self, row: Row, column: str, location: str) -> list[str]:
        """A tag for each word of a row's text, by the spans in a column. Raises UserError for
        others, and for spans that would be lost."""
        text = text_of(row, self.words, location)
        found = tagged(self._spans(row, row[column], column, location), words_of(text))
        self._refuse_lost([(location, *one) for one in found.lost], column)
        return found.tags

    def _spans(self, row: Row, value: Any, column: str, location: str) -> list[Span]:
        text = text_of(row, self.words, location)
        return entities_of(value, text, f"{location}: {column!r}")

    def _words_in(self, row: Row, location: str) -> list[str]:
        name = self.words
        if self.in_text:
            text = text_of(row, name, location)
            if not (found := texts_of(text, words_of(text))):
                raise UserError(f"{location}: {name!r} holds no word. Take the row out.")
            return found
        found = value_of(row, name, location)
        if not isinstance(found, list) or not found:
            raise UserError(
                f"{location}: {name!r} must be a list of words, at least one, got "
                f"{'an empty list' if found == [] else kind_of(found)}. Write the words as a list "
                "of texts, or take the row out."
            )
        if not (set(map(type, found)) == {str} and "".join(found).isascii()):
            for number, word in enumerate(found):
                check_text(word, f"{location}: word {number} of {name!r}")
        return found

    def _example(self, row: Row, location: str) -> tuple[bool, list[str], list[int], int]:
        """Whether a row has tags, its words, their class ids, and how many of its spans have more
        than they say."""
        own, column, widened = self._words_in(row, location), self.label_column, 0
        value, count = row.get(column), len(own)
        if self._ids is None or value is None:
            return False, own, [-1] * count, 0
        if self.in_text:
            places = words_of(row[self.words])
            value, lost, widened = tagged(self._spans(row, value, column, location), places)
            self._lost += [(location, *one) for one in lost]
        if not isinstance(value, list) or len(value) != count:
            got = f"{len(value)} of them" if isinstance(value, list) else kind_of(value)
            raise UserError(
                f"{location}: {column!r} must be a list of one tag for each of the {count} words "
                f"in {self.words!r}, got {got}. Correct the row or take it out."
            )
        tags = [self._ids.of_value(tag, location) for tag in value]
        if min(tags) < 0:
            raise UserError(
                f"{location}: word {tags.index(-1)} has no tag in {column!r}. Give each word of "
                "a row a tag, or write null in place of the whole list."
            )
        return True, own, tags, widened

    @staticmethod
    def _refuse_lost(lost: Sequence[tuple[str, Span, str]], column: str) -> None:
        """Raises UserError where there is a span that tags cannot tell.

        lost: where each stands, the span, and why.
        """
        if not lost:
            return
        (location, span, why), *others = lost
        locations = list(dict.fromkeys(other for other, _, _ in others))
        dots = ", ..." if len(locations) > _SHOWN else ""
        more = f" {len(others):,} more are lost so: {', '.join(locations[:_SHOWN])}{dots}."
        raise UserError(
            f"{location}: {column!r}: the span {span} {why}, so it would be lost. Correct its "
            f"ends, join it with the other, or take one out.{more if others else ''}"
        )


class QuestionRows(RowForm):
    """A question and its context, with answers: one or more, of which one is enough. Where words
    are tagged any number, all of them right together, and none."""

    label_key = "answers"
    labels_are = ("answers", "some", "")

    @property
    def key_columns(self) -> dict[str, str]:
        return {"question": self.columns.question, "context": self.columns.context}

    def state(self, labels: list[str]) -> list[Any]:
        return [_named(self.task.data.columns), "contexts", self.task.type]

    def begin(self, labels: list[str], *, unordered: bool) -> pa.Schema:
        return QUESTIONS

    def examples(self, rows: Sequence[tuple[str, Row]]) -> tuple[list[bool], list[Any]]:
        found = [self._example(row, location) for location, row in rows]
        asked, contexts, answers = map(list, zip(*found, strict=True))
        numbers = [-1 if some is None else len(some) for some in answers]
        keys = content_keys(asked, contexts)
        columns = [asked, contexts, answers, numbers, keys[:, 0], keys[:, 1]]
        return [some is not None for some in answers], columns

    def _example(self, row: Row, location: str) -> list[Any]:
        question, context = self.fields(row, location)
        any_number, answers = self.task.of_words, row.get(self.columns.answers)
        if any_number and not words_of(context):
            name = self.columns.context
            raise UserError(f"{location}: {name!r} holds no word. Take the row out.")
        if answers is not None:
            what = f"{location}: {self.columns.answers!r}"
            answers = (parts_of if any_number else answers_of)(answers, context, what)
        return [question, context, answers]


ROW_FORMS: dict[Rows, type[RowForm]] = {
    "text": TextRows,
    "words": WordRows,
    "question": QuestionRows,
}
"""By what a task's rows are."""


def text_columns(columns: Columns, present: Collection[str]) -> Columns:
    """The columns of one file: those of the recipe, or text_a and text_b where it names none and
    the file has no column `text`.

    present: those of the file.
    """
    by_default = (columns.text, columns.text_b) == ("text", None)
    if by_default and "text" not in present and {"text_a", "text_b"} <= set(present):
        return columns.model_copy(update={"text": "text_a", "text_b": "text_b"})
    return columns


def _named(columns: Columns) -> dict[str, Any]:
    """The columns that converted files depend on."""
    return columns.model_dump(exclude={*NAMED})
