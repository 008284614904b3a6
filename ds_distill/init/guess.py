"""Which columns of a folder or a file are texts and labels, by their names and what they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ds_distill.data.labels import as_list
from ds_distill.data.readers import Reader, open_file
from ds_distill.data.sources import USUAL_NAMES, folder_splits
from ds_distill.errors import UserError
from ds_distill.recipe.data import Columns
from ds_distill.recipe.tasks import TASKS

ROWS = 20_000
"""Of a split, that are looked at."""
LENGTHS = 2000
"""Of these, about so many say how long texts are."""
MOST_CLASSES = 20
"""Whole numbers with more values than that are taken for numbers, and not for classes, unless they
have names."""

LABEL_NAMES = (
    *("label", "labels", "class", "category", "categories", "target", "sentiment", "intent"),
    *("emotion", "topic", "score", "rating", "stars", "y"),
)
TEXT_NAMES = ("text", "sentence", "content", "body", "message", "review", "tweet", "abstract")
PAIRS = (
    *(("text_a", "text_b"), ("sentence1", "sentence2"), ("premise", "hypothesis")),
    *(("question1", "question2"), ("question", "sentence"), ("question", "passage")),
    *(("query", "document"), ("query", "passage")),
)


@dataclass(frozen=True)
class DataOptions:
    """What the user says of the data; None: to be guessed."""

    task: str | None = None
    text: Sequence[str] = ()
    """One column, or two of a pair."""
    label: str | None = None


@dataclass(frozen=True)
class Guess:
    task: str
    columns: dict[str, str]
    """Keys of `task.data.columns` that are not as by default."""
    splits: dict[str, str]
    """Split to its file's name; empty where the usual names are there."""
    has: tuple[str, ...]
    """The splits that there are, with labels where the task has any; train also without."""
    texts: list[list[str]]
    """Of some examples, all that a model reads: one text, two, or words."""
    labelled: bool = True
    """Whether train has labels, where the task has any."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what was seen."""


def guess(data: Path, options: DataOptions) -> Guess:
    """Raises UserError for data that cannot be read, or whose columns cannot be told."""
    splits, files = _splits(data)
    train = _Table.read(files["train"], options)
    judges = [split for split in ("validation", "test") if split in files]
    labelled = options.task == "masked-lm" or train.has_labels()
    others = (_Table.read(files[split], options) for split in judges if not labelled)
    told = next((table for table in others if table.has_labels()), train)
    task, named = told.columns_of_task()
    label = next((named[key] for key in _OF_LABELS if key in named), None)
    notes = [f"{files['train'].name} has the columns {', '.join(train.values)}."]
    if train.reader.read_as is not None:
        notes.append(f"It is read as {train.reader.read_as}.")
    if told is not train:
        notes.append(f"It has no labels: {told.reader.name} says what they are.")
        splits = {name: file.name for name, file in files.items()}
    for split in judges if label is not None else ():
        if not _Table.read(files[split], options).values.get(label or ""):
            notes.append(f"{files.pop(split).name} has no labels, and is left out.")
            splits = {name: file.name for name, file in files.items()}
    texts = [name for key, name in named.items() if key not in _OF_LABELS]
    if lacks := [name for name in texts if name not in train.rows]:
        raise UserError(
            f"{train.reader.name}: no column {lacks[0]!r}, which {told.reader.name} has. Call the "
            "columns alike in all files."
        )
    reads = [train.rows[name] for name in texts]
    some = list(zip(*reads, strict=True))[:: max(1, len(reads[0]) // LENGTHS)]
    usual = Columns().model_dump()
    own = {key: name for key, name in named.items() if usual[key] != name}
    if own == {"text": "text_a", "text_b": "text_b"}:
        own = {}  # taken without naming them
    read = [_texts(row) for row in some]
    return Guess(task, own, splits, tuple(files), read, told is train, notes)


_OF_LABELS = ("label", "tags", "spans", "answers")


def _splits(data: Path) -> tuple[dict[str, str], dict[str, Path]]:
    """(split to file's name, where they are not the usual ones; split to its file)."""
    if not data.is_dir():
        return {}, {"train": data}
    task: Any = TASKS["single-label"].model_validate({"data": {"path": str(data)}})
    files = folder_splits(task, data)
    if "train" in files:
        return {}, files
    trains = [name for name in files if re.search(r"(?<![a-z])train(?![a-z])", name.lower())]
    if len(trains) != 1:
        there = ", ".join(file.name for file in files.values())
        raise UserError(
            f"{data}: {'no' if not trains else 'more than one'} file for the split train (it has: "
            f"{there}). Name one train.csv, or give one file in place of the folder."
        )
    [train] = trains  # own_train beside own_val
    found = {"train": files[train]}
    for name, split in {"validation": "validation", "test": "test", **USUAL_NAMES}.items():
        other = re.sub("train", name, train, flags=re.IGNORECASE)
        if other in files:
            found.setdefault(split, files[other])
    return {split: file.name for split, file in found.items()}, found


def _texts(fields: Sequence[Any]) -> list[str]:
    flat = [item for one in fields for item in (one if isinstance(one, list) else [one])]
    return [str(item) for item in flat if item is not None]


def _are_texts(lists: Sequence[list[Any]]) -> bool:
    return all(isinstance(item, str) for one in lists for item in one)


def _number(value: Any, reader: Reader) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not reader.numbers_are_text:
        return None
    try:
        return float(value)
    except ValueError:
        return None


@dataclass(frozen=True)
class _Table:
    reader: Reader
    rows: Mapping[str, Sequence[Any]]
    """By column, of each row; in CSV lists, where all are their JSON."""
    values: Mapping[str, Sequence[Any]]
    """The same without those that are empty, or -1 in all rows."""
    options: DataOptions

    @classmethod
    def read(cls, file: Path, options: DataOptions) -> _Table:
        reader = open_file(file)
        columns = reader.columns()
        rows = [row for _, row in islice(reader.rows(columns), ROWS)]
        if not rows:
            raise UserError(f"{reader.name}: no rows. Put at least one example there.")
        found: dict[str, list[Any]] = {}
        for name in columns:
            own = [row.get(name) for row in rows]
            lists = [as_list(value, reader) for value in own]
            all_lists = all(isinstance(one, list) for one in lists if one is not None)
            found[name] = lists if all_lists else own
        values = {name: [v for v in own if v not in (None, "")] for name, own in found.items()}
        none = ({"-1"}, {"-1.0"})
        values = {k: [] if {*map(str, own)} in none else own for k, own in values.items()}
        return cls(reader, found, values, options)

    def shape(self, name: str) -> str:
        """What a column holds: "" for nothing, or what is none of these."""
        values = self.values[name]
        if not values:
            return ""
        if all(isinstance(value, list) for value in values):
            return "lists"
        if self.reader.label_names(name) is not None:
            return "classes"
        numbers = [_number(value, self.reader) for value in values]
        if None not in numbers:
            whole = all(number is not None and number.is_integer() for number in numbers)
            return "whole numbers" if whole else "numbers"
        return "texts" if all(isinstance(value, str) for value in values) else ""

    def columns_of_task(self) -> tuple[str, dict[str, str]]:
        """The task, and its columns by their keys."""
        asked, names = self.options.task, self.values.keys()
        if asked == "masked-lm":
            return asked, _as_pair(self._text_columns())
        if {"question", "context", "answers"} <= names and self._may_be("answers"):
            columns = {key: key for key in ("question", "context", "answers")}
            found = "extractive-qa", columns
        elif "tokens" in names and (tags := self._tags()):
            what = "Which column has the tags?"
            tag = "tags" if "tags" in tags else _only(what, tags, "--label")
            found = "token-classification", {"tokens": "tokens", "tags": tag}
        elif "spans" in names and self._may_be("spans"):
            [text] = self._text_columns()[:1]
            found = "token-classification", {"text": text, "spans": "spans"}
        elif asked in (None, "single-label", "multi-label", "regression"):
            label = self._label_column()
            found = self._task_of(label), {**_as_pair(self._text_columns(label)), "label": label}
        else:
            found = "", {}
        if asked is not None and not _alike(asked, found):
            raise UserError(
                f"{self.reader.name}: no columns of the task {asked} (columns: "
                f"{', '.join(names)}). docs/data.md says which it needs, and their names."
            )
        return asked or found[0], found[1]

    def has_labels(self) -> bool:
        """Whether it has the columns of a task, with labels."""
        try:
            _, named = self.columns_of_task()
        except UserError:
            return self.options.label in self.values  # what is odd there is told
        return all(self.values[named[key]] for key in _OF_LABELS if key in named)

    def _may_be(self, label: str) -> bool:
        """Whether a column of a usual name may have the labels."""
        return self.options.label in (None, label) and bool(self.values[label])

    def _tags(self) -> list[str]:
        """The columns that have in each row as many values as there are words."""
        lengths = [*map(len, self.values["tokens"])]
        asked = self.options.label
        return [
            name
            for name, lists in self.values.items()
            if name != "tokens" and self.shape(name) == "lists" and asked in (None, name)
            if [*map(len, lists)] == lengths
            if self.reader.label_names(name) is not None or _are_texts(lists)
        ]

    def _task_of(self, label: str) -> str:
        shape, several = self.shape(label), len({*map(str, self.values[label])})
        by_shape = {"lists": "multi-label", "numbers": "regression"}
        if shape == "whole numbers" and several > MOST_CLASSES:
            return "regression"
        return by_shape.get(shape, "single-label")

    def _label_column(self) -> str:
        given, columns = self.options.label, ", ".join(self.values)
        if given is not None:
            if given not in self.values:
                raise UserError(f"--label {given}: {self.reader.name} has the columns {columns}.")
            return given
        for name in ("label", "labels"):
            if self.values.get(name):
                return name
        filled = [name for name, values in self.values.items() if values]
        possible = [name for name in filled if name.lower() in LABEL_NAMES]
        if not possible:
            possible = [name for name in filled if self._recur(name)]
        if not possible:
            raise UserError(
                f"{self.reader.name}: no column looks like labels (columns: {columns}). Name it: "
                "--label COLUMN; or, for texts alone, --task masked-lm."
            )
        return _only("Which column has the labels?", possible, "--label")

    def _recur(self, name: str) -> bool:
        """Whether a column has few different values, as labels are, or names of its numbers."""
        values, shape = self.values[name], self.shape(name)
        few = 1 < len({*map(str, values)}) <= max(2, min(100, len(values) // 5))
        return shape == "classes" or (shape in ("texts", "whole numbers", "lists") and few)

    def _text_columns(self, label: str | None = None) -> list[str]:
        """One column, or two of a pair."""
        if self.options.text:
            for name in self.options.text:
                if name not in self.values:
                    columns = ", ".join(self.values)
                    raise UserError(f"--text {name}: {self.reader.name} has {columns}.")
            return list(self.options.text[:2])
        texts = [name for name in self.values if self.shape(name) == "texts" and name != label]
        for pair in PAIRS:
            if {*pair} <= {*texts}:
                return list(pair)
        for usual in TEXT_NAMES:
            for column in texts:
                if column.lower() == usual:
                    return [column]
        if not texts:
            raise UserError(f"{self.reader.name}: no column holds texts. Name it: --text COLUMN.")
        return [_only("Which column has the text?", texts, "--text")]


def _alike(asked: str, found: tuple[str, dict[str, str]]) -> bool:
    """Whether a task is of the columns that were found."""
    groups = (
        {"extractive-qa", "character-spans"},
        {"token-classification"},
        {"single-label", "multi-label", "regression"},
    )
    return any({asked, found[0]} <= group for group in groups)


def _only(what: str, options: Sequence[str], flag: str) -> str:
    """Raises UserError for more than one, and names the option that says which."""
    if len(options) > 1:
        raise UserError(f"{what} It may be {', '.join(options)}. Say which: {flag} COLUMN.")
    return options[0]


def _as_pair(texts: Sequence[str]) -> dict[str, str]:
    return dict(zip(("text", "text_b"), texts, strict=False))
