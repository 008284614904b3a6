"""What a row of a task's data is, in the columns of one file: a text or a pair of them, a list of
words, or a question about a context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_distill.data import questions, words
from ds_distill.data.examples import convert
from ds_distill.data.readers import Reader
from ds_distill.data.words import WordColumns
from ds_distill.keys import content_keys
from ds_distill.recipe.data import Columns
from ds_distill.recipe.tasks import Rows, Task


class RowForm(ABC):
    """The rows of one file."""

    def __init__(self, task: Task, reader: Reader) -> None:
        self.task, self.reader = task, reader
        self.columns = task.data.columns

    label_key: str
    """The key of `task.data.columns` that names the labels' column."""

    @property
    def label_column(self) -> str:
        return str(getattr(self.task.data.columns, self.label_key))

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
    def convert(self, labels: list[str], path: Path, *, found: bool) -> None:
        """Write the examples to an Arrow file; labels: none where the file has no column of
        them. found: as of `LabelIds`."""

    def keys(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The content keys of rows as the reader gives them: int64 [n, 2]."""
        return content_keys(*([row[name] for row in rows] for name in self.key_columns.values()))


class TextRows(RowForm):
    """A text, or a pair of them, with a label, any number of labels, or a number."""

    label_key = "label"

    def __init__(self, task: Task, reader: Reader) -> None:
        super().__init__(task, reader)
        self.columns = text_columns(self.columns, reader.columns())
        self._many, self._numbers = task.predicts == "labels", task.predicts == "number"

    @property
    def key_columns(self) -> dict[str, str]:
        named = {"text": self.columns.text, "text_b": self.columns.text_b}
        return {key: name for key, name in named.items() if name is not None}

    def state(self, labels: list[str]) -> list[Any]:
        kinds = [*["many labels"] * self._many, *["numbers"] * self._numbers]
        class_names = self.reader.label_names(self.label_column)
        return [_named(self.columns), labels, class_names, *kinds]

    def convert(self, labels: list[str], path: Path, *, found: bool) -> None:
        how = {"many_labels": self._many, "numbers": self._numbers, "found": found}
        convert(self.reader, self.columns, labels, path, **how)


class WordRows(RowForm):
    """A list of words with their tags, or a text with spans."""

    def __init__(self, task: Task, reader: Reader) -> None:
        super().__init__(task, reader)
        self.words = WordColumns.of(self.columns, reader.columns())
        self.label_key = "spans" if self.words.in_text else "tags"

    @property
    def key_columns(self) -> dict[str, str]:
        return {"tokens": self.words.words}

    def tags(self) -> list[str] | None:
        return words.entity_tags(self.reader, self.words) if self.words.in_text else None

    def state(self, labels: list[str]) -> list[Any]:
        columns = text_columns(self.columns, self.reader.columns())  # of a text with spans
        class_names = self.reader.label_names(self.label_column)
        return [_named(columns), labels, class_names, "words", words.VERSION]

    def convert(self, labels: list[str], path: Path, *, found: bool) -> None:
        words.convert(self.reader, self.words, labels, path, found=found)

    def keys(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        lists = [self.words.words_of_row(row[self.words.words]) for row in rows]
        return words.word_keys(lists)


class QuestionRows(RowForm):
    """A question and its context, with answers."""

    label_key = "answers"

    @property
    def key_columns(self) -> dict[str, str]:
        return {"question": self.columns.question, "context": self.columns.context}

    def state(self, labels: list[str]) -> list[Any]:
        return [_named(self.columns), "contexts", *["any number"] * (self.task.predicts == "tag")]

    def convert(self, labels: list[str], path: Path, *, found: bool) -> None:
        any_number = self.task.predicts == "tag"
        questions.convert(self.reader, self.columns, path, any_number=any_number)


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
    return columns.model_dump(exclude={"group", "teacher", "id"})
