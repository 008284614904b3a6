"""What a folder or a file of examples seems to be: which task, which columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_distill.data.label_vectors import as_list
from ds_distill.data.readers import Reader, open_file
from ds_distill.data.splits import USUAL_NAMES, folder_splits
from ds_distill.errors import UserError
from ds_distill.recipe.data import Columns
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import TASKS

ROWS = 20_000
"""Of the training split, that are looked at."""
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
_TAG = re.compile(rf"{OUTSIDE}|[BI]-.+")


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
    """The splits that there are, with labels where the task has any."""
    texts: list[list[str]]
    """Of some examples, all that a model reads: one text, two, or words."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what was seen."""


def guess(data: Path, options: DataOptions) -> Guess:
    """Raises UserError for data that cannot be read, or are no examples of a known kind, or not of
    the task that the options name."""
    splits, files = _splits(data)
    reader = open_file(files["train"])
    columns = reader.columns()
    rows = [row for _, row in islice(reader.rows(columns), ROWS)]
    if not rows:
        raise UserError(f"{reader.name}: no rows. Put at least one example there.")
    values = {name: _filled([row.get(name) for row in rows], reader) for name in columns}
    shapes = {name: _shape_of(name, found, reader) for name, found in values.items()}
    seen = ", ".join(f"{name} ({shapes[name]})" for name in columns)
    notes = [f"{files['train'].name} has the columns {seen}."]
    if reader.read_as is not None:
        notes.append(f"It is read as {reader.read_as}.")
    task, named = _task_and_columns(_Table(reader, values, shapes, options))
    label = next((named[key] for key in _OF_LABELS if key in named), None)
    judged = [split for split in ("validation", "test") if split in files and label is not None]
    for split in judged:
        if not _has_any(label, files[split]):
            notes.append(f"{files.pop(split).name} has no labels, and is left out.")
            splits = {name: file.name for name, file in files.items()}
    usual = Columns().model_dump()
    reads = [name for key, name in named.items() if key not in _OF_LABELS]
    some = rows[:: max(1, len(rows) // LENGTHS)]
    texts = [_texts([row.get(name) for name in reads]) for row in some]
    own = {key: name for key, name in named.items() if usual[key] != name}
    if own == {"text": "text_a", "text_b": "text_b"}:
        own = {}  # taken without naming them
    return Guess(task, own, splits, tuple(files), texts, notes)


_OF_LABELS = ("label", "tags", "spans", "answers")


def _has_any(label: str | None, file: Path) -> bool:
    """Whether any of a file's first rows has a label, in the column of that name."""
    reader = open_file(file)
    if label not in reader.columns():
        return False
    rows = islice(reader.rows([label]), ROWS)
    return any(row.get(label) not in (None, "", -1, "-1", "-1.0") for _, row in rows)


def _splits(data: Path) -> tuple[dict[str, str], dict[str, Path]]:
    """(split to file's name, where they are not the usual ones; split to its file)."""
    if not data.is_dir():
        return {}, {"train": data}
    task: Any = TASKS["single-label"].settings.model_validate({"data": {"path": str(data)}})
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
    names = {"validation": "validation", "test": "test", **USUAL_NAMES}
    found = {"train": files[train]}
    for name, split in names.items():
        other = re.sub("train", name, train, flags=re.IGNORECASE)
        if other in files:
            found.setdefault(split, files[other])
    return {split: file.name for split, file in found.items()}, found


def _filled(values: Sequence[Any], reader: Reader) -> list[Any]:
    """What a column has; in CSV lists, where all are their JSON."""
    lists = [one for one in (as_list(value, reader) for value in values) if one is not None]
    if all(isinstance(one, list) for one in lists):
        return lists
    return [value for value in values if value is not None]


def _shape_of(name: str, values: Sequence[Any], reader: Reader) -> str:
    """What a column holds: classes, where it declares names of its numbers."""
    shape = _shape(values, reader.numbers_are_text)
    if shape not in ("whole numbers", "lists of whole numbers") or reader.label_names(name) is None:
        return shape
    return "classes" if shape == "whole numbers" else "lists of classes"


def _shape(values: Sequence[Any], numbers_are_text: bool) -> str:
    """What a column holds."""
    filled = [value for value in values if value not in ("", [])]
    if not filled:
        return "empty"
    if all(isinstance(value, list) for value in filled):
        items = [item for value in filled for item in value]
        if all(isinstance(item, str) for item in items):
            return "lists of texts"
        if all(isinstance(item, Mapping) for item in items):
            keys = set.intersection(*(set(item) for item in items))
            if {"start", "end", "type"} <= keys:
                return "spans"
            if {"text", "start"} <= keys or {"start", "end"} <= keys:
                return "answers"
        whole = all(isinstance(item, int | float) and item % 1 == 0 for item in items)
        return "lists of whole numbers" if whole else "lists"
    if all(isinstance(value, Mapping) for value in filled):
        return "answers" if all("answer_start" in value for value in filled) else "objects"
    if all(isinstance(value, bool) for value in filled):
        return "texts"
    if all(isinstance(value, int | float) for value in filled):
        return _kind_of_numbers(filled)
    if not all(isinstance(value, str) for value in filled):
        return "mixed"
    if numbers_are_text:
        try:
            return _kind_of_numbers([float(value) for value in filled])
        except ValueError:
            pass
    return "texts"


def _kind_of_numbers(values: Sequence[float]) -> str:
    return "whole numbers" if all(float(value).is_integer() for value in values) else "numbers"


def _texts(fields: Sequence[Any]) -> list[str]:
    flat = [item for one in fields for item in (one if isinstance(one, list) else [one])]
    return [str(item) for item in flat if item is not None]


# ------------------------------------------------------------------------- one kind after another

Found = tuple[str, dict[str, str]]
"""The task, and its columns by their keys."""


@dataclass(frozen=True)
class _Table:
    reader: Reader
    values: Mapping[str, Sequence[Any]]
    """By column, of the rows that have one."""
    shapes: Mapping[str, str]
    """By column, what these are; see `_shape_of`."""
    options: DataOptions

    def of_shape(self, *shapes: str) -> list[str]:
        return [name for name, shape in self.shapes.items() if shape in shapes]

    @property
    def name(self) -> str:
        return self.reader.name

    @property
    def columns(self) -> str:
        return ", ".join(self.shapes)


def _task_and_columns(table: _Table) -> Found:
    asked = table.options.task
    for find, tasks in _FINDERS:
        if (asked is None or asked in tasks) and (found := find(table)) is not None:
            return asked or found[0], found[1]
    raise UserError(
        f"{table.name}: no columns of the task {asked} (columns: {table.columns}). docs/data.md "
        "says which it needs; init knows them by what they hold."
    )


def _questions(table: _Table) -> Found | None:
    answers = _labels_among("answers", table.of_shape("answers"), table)
    texts = table.of_shape("texts")
    if answers is None or not {"question", "context"} <= set(texts):
        return None
    return "extractive-qa", {"question": "question", "context": "context", "answers": answers}


def _words(table: _Table) -> Found | None:
    found = {
        name: _words_beside(name, table)
        for name in table.of_shape("lists of texts", "lists of classes")
    }
    tags = [name for name, words in found.items() if _are_tags(name, words, table)]
    if table.options.label is not None:
        tags = [name for name in tags if name == table.options.label]
    if not tags:
        return None
    tag = "tags" if "tags" in tags else _only("Which column has the tags?", tags, "--label")
    alike = found[tag]
    if not alike:
        raise UserError(
            f"{table.name}: column {tag!r} has tags, and no column has as many words in each "
            "row. Put the words of each text there as a list: `tokens`."
        )
    return "token-classification", {"tokens": _named("tokens", alike) or alike[0], "tags": tag}


def _words_beside(tag: str, table: _Table) -> list[str]:
    """The columns that have in each row as many words as another one has tags."""
    lengths = [*map(len, table.values[tag])]
    return [
        name
        for name in table.of_shape("lists of texts")
        if name != tag and [*map(len, table.values[name])] == lengths
    ]


def _are_tags(name: str, words: Sequence[str], table: _Table) -> bool:
    """Whether a column's lists are tags: by what they hold, or, as classes may also be any number
    of labels of a text, by the words beside them."""
    if table.shapes[name] == "lists of classes":
        return bool(words)
    return all(_TAG.fullmatch(tag) for tags in table.values[name] for tag in tags)


def _spans(table: _Table) -> Found | None:
    spans = _labels_among("spans", table.of_shape("spans"), table)
    if spans is None:
        return None
    text = _text_columns(table, {spans})
    return "token-classification", {"text": text[0], "spans": spans}


def _labelled(table: _Table) -> Found:
    label = _label_column(table)
    task = table.options.task or _task_of(table.values[label], table.shapes[label])
    if task is None:
        raise UserError(
            f"{table.name}: column {label!r} holds {table.shapes[label]}, which are no labels. "
            "Name another column: --label COLUMN."
        )
    texts = _text_columns(table, {label})
    return task, {**_as_pair(texts), "label": label}


def _texts_alone(table: _Table) -> Found:
    return "masked-lm", _as_pair(_text_columns(table, set()))


_FINDERS: tuple[tuple[Callable[[_Table], Found | None], tuple[str, ...]], ...] = (
    (_questions, ("extractive-qa", "character-spans")),
    (_words, ("token-classification",)),
    (_spans, ("token-classification",)),
    (_labelled, ("single-label", "multi-label", "regression")),
    (_texts_alone, ("masked-lm",)),
)
"""In the order in which they are tried, with the tasks that each can find."""


def _task_of(labels: Sequence[Any], shape: str) -> str | None:
    if shape in ("lists of texts", "lists of classes", "lists of whole numbers"):
        return "multi-label"
    if shape == "numbers":
        return "regression"
    if shape == "whole numbers":
        return "single-label" if len({*map(str, labels)}) <= MOST_CLASSES else "regression"
    return "single-label" if shape in ("texts", "classes") else None


def _label_column(table: _Table) -> str:
    if table.options.label is not None:
        if table.options.label not in table.shapes:
            raise UserError(
                f"--label {table.options.label}: {table.name} has the columns {table.columns}."
            )
        return table.options.label
    for name in ("label", "labels"):
        if name in table.shapes:
            return name
    known = [column for column in table.shapes if column.lower() in LABEL_NAMES]
    possible = known or [
        name
        for name, found in table.values.items()
        if table.shapes[name] in ("classes", "lists of classes")
        or (table.shapes[name] in ("texts", "whole numbers", "lists of texts") and _recur(found))
    ]
    if not possible:
        raise UserError(
            f"{table.name}: no column looks like labels (columns: {table.columns}). Name it: "
            "--label COLUMN; or, for texts alone, --task masked-lm."
        )
    return _only("Which column has the labels?", possible, "--label")


def _recur(values: Sequence[Any]) -> bool:
    """Whether a column has few different values, as labels are."""
    return 1 < len({*map(str, values)}) <= max(2, min(100, len(values) // 5))


def _text_columns(table: _Table, taken: set[str]) -> list[str]:
    """One column, or two of a pair."""
    texts = [name for name in table.shapes if table.shapes[name] == "texts" and name not in taken]
    if table.options.text:
        for name in table.options.text:
            if name not in table.shapes:
                raise UserError(f"--text {name}: {table.name} has {table.columns}.")
        return list(table.options.text[:2])
    for pair in PAIRS:
        if {*pair} <= {*texts}:
            return list(pair)
    for name in TEXT_NAMES:
        for column in texts:
            if column.lower() == name:
                return [column]
    if not texts:
        raise UserError(f"{table.name}: no column holds texts. Name it: --text COLUMN.")
    # Ids and names are short; of columns with long texts one cannot know which is meant.
    lengths = {name: fmean(map(len, table.values[name])) for name in texts}
    longest = max(lengths.values())
    possible = [name for name in texts if lengths[name] > longest / 3]
    return [_only("Which column has the text?", possible, "--text")]


def _only(what: str, options: Sequence[str], flag: str) -> str:
    """Raises UserError for more than one, and names the option that says which."""
    if len(options) > 1:
        raise UserError(f"{what} It may be {', '.join(options)}. Say which: {flag} COLUMN.")
    return options[0]


def _as_pair(texts: Sequence[str]) -> dict[str, str]:
    return dict(zip(("text", "text_b"), texts, strict=False))


def _named(name: str, columns: Sequence[str]) -> str | None:
    """The column of that name, else the first."""
    return name if name in columns else next(iter(columns), None)


def _labels_among(name: str, columns: Sequence[str], table: _Table) -> str | None:
    """The column that the user names, if it is one of these; else as `_named`."""
    asked = table.options.label
    return _named(name, columns if asked is None else [one for one in columns if one == asked])
