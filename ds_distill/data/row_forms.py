"""What a row of a task's data is, in the columns of one file: a text or a pair of them, a list of
words, or a question about a context. Converted once to a file of examples that hold all rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ds_distill.data import groups, ids, questions, teacher_column, words
from ds_distill.data.columns import BATCH, write_columns
from ds_distill.data.examples import text_schema
from ds_distill.data.labels import LabelIds, LabelSets, Numbers, label_array
from ds_distill.data.readers import Reader, name_of, text_of
from ds_distill.data.words import WordColumns
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.process.garbage_collection import without_garbage_collection
from ds_distill.recipe.data import Columns
from ds_distill.recipe.tasks import Rows, Task

NAMED: dict[str, tuple[pa.Schema, Callable[[list[str | None]], list[pa.Array]]]] = {
    "group": (groups.NAMED, groups.named_groups),
    "teacher": (teacher_column.NAMED, teacher_column.named_teachers),
    "id": (ids.NAMED, ids.hashed_ids),
}
"""By key of `task.data.columns`: names beside an example, and the columns that are made of them."""

_NO_LABEL = " -1 is none where task.labels does not name it."


class RowForm(ABC):
    """The rows of one file."""

    label_key: str
    """The key of `task.data.columns` that names the labels' column."""
    labels_are = ("label", "one", "")
    """What a row has in that column, a word for it, and more that is said where only some have."""

    def __init__(self, task: Task, reader: Reader) -> None:
        self.task, self.reader = task, reader
        self.columns = task.data.columns

    @property
    def label_column(self) -> str:
        return str(getattr(self.task.data.columns, self.label_key))

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

    @abstractmethod
    def example(self, row: Mapping[str, Any], location: str) -> Sequence[Any]:
        """Whether a row has a label, and then its values. Raises UserError where it breaks a
        rule."""

    @abstractmethod
    def arrays(self, values: list[list[Any]]) -> list[Any]:
        """The columns of some examples, of the values of each."""

    def convert(
        self, labels: list[str], path: Path, *, unordered: bool, named: Mapping[str, str]
    ) -> None:
        """Write the examples to an Arrow stream file.

        labels, unordered: as of `begin`. named: by key of `NAMED`, columns that the file has.

        Raises UserError with the location of the first invalid row.
        """
        schema = self.begin(labels, unordered=unordered)
        for key in named:
            schema = pa.schema([*schema, *NAMED[key][0]])
        rows = self._examples(named)

        def batches() -> Iterator[list[Any]]:
            while batch := list(islice(rows, BATCH)):
                values = list(map(list, zip(*batch, strict=True)))
                last = len(values) - len(named)
                columns = self.arrays(values[:last])
                for key, names in zip(named, values[last:], strict=True):
                    columns += NAMED[key][1](names)
                yield columns

        with without_garbage_collection():  # rows live for one batch, and hold no cycles
            count = write_columns(path, schema, batches())
        if count == 0:
            raise UserError(f"{self.reader.name}: no rows. Put at least one example there.")

    def _examples(self, named: Mapping[str, str]) -> Iterator[list[Any]]:
        columns = [*self.key_columns.values()]
        if self.task.predicts not in ("token", "nothing"):
            columns.append(self.label_column)
        columns += [column for key in NAMED if (column := getattr(self.columns, key)) is not None]
        first: dict[bool, str] = {}
        """Of rows that have labels, and of those that have none: where."""
        for location, row in self.reader.rows(columns):
            has_labels, *values = self.example(row, location)
            if has_labels not in first:
                first[has_labels] = location
                self._refuse_mixed(first)
            if named:
                values += [name_of(row, name, key, location) for key, name in named.items()]
            yield values

    def _refuse_mixed(self, first: Mapping[bool, str]) -> None:
        """Raises UserError where some rows have labels and others have none."""
        if len(first) > 1:
            what, some, advice = self.labels_are
            raise UserError(
                f"no {what} in {self.label_column!r}, but {first[True]} has {some}. Give every row "
                f"of a split {some}, or none.{advice}",
                at=first[False],
            )

    def keys(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The content keys of rows as the reader gives them: int64 [n, 2]."""
        return content_keys(*([row[name] for row in rows] for name in self.key_columns.values()))


class TextRows(RowForm):
    """A text, or a pair of them, with a label, any number of labels, or a number."""

    label_key = "label"

    def __init__(self, task: Task, reader: Reader) -> None:
        super().__init__(task, reader)
        self.columns = text_columns(self.columns, reader.columns())
        self._labels: LabelIds | LabelSets | Numbers | None = None
        self._names = [*self.key_columns.values()], self.label_column

    @property
    def key_columns(self) -> dict[str, str]:
        texts = {"text": self.columns.text, "text_b": self.columns.text_b}
        return {key: name for key, name in texts.items() if name is not None}

    def state(self, labels: list[str]) -> list[Any]:
        class_names = self.reader.label_names(self.label_column)
        return [_named(self.columns), labels, class_names, self.task.predicts]

    def begin(self, labels: list[str], *, unordered: bool) -> pa.Schema:
        column = self.label_column
        if self.task.predicts == "number" and self.has_labels:
            self._labels = Numbers(self.reader, column)
        elif labels and self.task.predicts == "labels":
            self._labels = LabelSets(labels, self.reader, column, unordered=unordered)
        elif labels:
            self._labels = LabelIds(labels, self.reader, column, unordered=unordered)
            self.labels_are = ("label", "one", _NO_LABEL)
        return text_schema(self.columns.text_b is not None, self._labels and self._labels.type)

    def example(self, row: Mapping[str, Any], location: str) -> Sequence[Any]:
        texts, label_column = self._names
        texts = [text_of(row, name, location) for name in texts]
        if self._labels is None:
            return False, -1, *texts
        label = self._labels.of_value(row.get(label_column), location)
        return self._labels.is_one(label), label, *texts

    def arrays(self, values: list[list[Any]]) -> list[Any]:
        labels, *texts = values
        keys = content_keys(*texts)
        return [*texts, label_array(np.array(labels)), keys[:, 0], keys[:, 1]]


class WordRows(RowForm):
    """A list of words with their tags, or a text with spans."""

    labels_are = ("tags", "some", "")

    def __init__(self, task: Task, reader: Reader) -> None:
        super().__init__(task, reader)
        self.words = WordColumns.of(self.columns, reader.columns())
        self.label_key = "spans" if self.words.in_text else "tags"
        self._ids: LabelIds | None = None
        self._lost: list[words.Lost] = []

    @property
    def key_columns(self) -> dict[str, str]:
        return {"tokens": self.words.words}

    def tags(self) -> list[str] | None:
        return words.entity_tags(self.reader, self.words) if self.words.in_text else None

    def state(self, labels: list[str]) -> list[Any]:
        columns = text_columns(self.columns, self.reader.columns())  # of a text with spans
        class_names = self.reader.label_names(self.label_column)
        return [_named(columns), labels, class_names, "words", words.VERSION]

    def begin(self, labels: list[str], *, unordered: bool) -> pa.Schema:
        if labels:
            self._ids = LabelIds(labels, self.reader, self.words.tags, unordered=unordered)
        return words.EXAMPLES

    def example(self, row: Mapping[str, Any], location: str) -> Sequence[Any]:
        return self.words.example(row, location, self._ids, self._lost)

    def arrays(self, values: list[list[Any]]) -> list[Any]:
        lists, tags, widened = values
        keys = words.word_keys(lists)
        return [lists, tags, keys[:, 0], keys[:, 1], widened]

    def _examples(self, named: Mapping[str, str]) -> Iterator[list[Any]]:
        yield from super()._examples(named)
        words.refuse_lost(self._lost, self.words)

    def keys(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        lists = [self.words.words_of_row(row[self.words.words]) for row in rows]
        return words.word_keys(lists)


class QuestionRows(RowForm):
    """A question and its context, with answers: one or more, of which one is enough. Where words
    are tagged any number, all of them right together, and none."""

    label_key = "answers"
    labels_are = ("answers", "some", "")

    @property
    def key_columns(self) -> dict[str, str]:
        return {"question": self.columns.question, "context": self.columns.context}

    def state(self, labels: list[str]) -> list[Any]:
        return [_named(self.columns), "contexts", self.task.predicts]

    def begin(self, labels: list[str], *, unordered: bool) -> pa.Schema:
        return questions.EXAMPLES

    def example(self, row: Mapping[str, Any], location: str) -> Sequence[Any]:
        any_number = self.task.predicts == "tag"
        return questions.example(row, self.columns, location, any_number=any_number)

    def arrays(self, values: list[list[Any]]) -> list[Any]:
        asked, contexts, answers = values
        numbers = [-1 if some is None else len(some) for some in answers]
        keys = content_keys(asked, contexts)
        return [asked, contexts, answers, numbers, keys[:, 0], keys[:, 1]]


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
