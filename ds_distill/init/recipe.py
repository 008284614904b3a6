"""A first recipe from data and teachers. Which columns are texts and labels is guessed by their
names and what they hold; each guess stands there with a comment."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedConfig

from ds_distill.data.labels import as_list
from ds_distill.data.readers import open_file
from ds_distill.data.sources import USUAL_NAMES, folder_splits, open_files
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.errors import UserError, did_you_mean
from ds_distill.files import files_beside
from ds_distill.init import DEFAULT_TEACHER
from ds_distill.models.configuration import check_head, load_config, usable_length
from ds_distill.models.labels import are_generic, class_names
from ds_distill.recipe.data import Columns
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tags import are_entities
from ds_distill.recipe.tasks import TASKS
from ds_distill.recipe.text import one_line

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
    if not data.exists():
        near = did_you_mean(data.name, files_beside(data))
        raise UserError(f"{data}: no such file or folder.{near}")
    splits, files = _splits(data)
    used = [split for split in ("train", "validation", "test") if split in files]
    tables = {split: _Table(files[split], options) for split in used}
    train, of_task = tables["train"], options.task
    labelled = [table for table in tables.values() if of_task == "masked-lm" or table.has_labels()]
    sure = (table for table in labelled if any(map(table.values.get, LABEL_NAMES[:2])))
    told = next(sure, next(iter(labelled), train))
    task, named = told.columns_of_task()
    notes = [f"{files['train'].name} has the columns {', '.join(train.values)}."]
    if train.reader.read_as is not None:
        notes.append(f"It is read as {train.reader.read_as}.")
    if told is not train:
        notes.append(f"It has no labels: {told.reader.name} says what they are.")
        splits = {name: file.name for name, file in files.items()}
    label = next((named[key] for key in _OF_LABELS if key in named), None)
    for table in tables.values():
        near = did_you_mean(label or "", table.values.keys() - told.values.keys())
        if label not in table.values and near:
            raise _unlike(table, label, told, near)
    for split in used[1:] if label is not None else ():
        if not tables[split].values.get(label or ""):
            notes.append(f"{files.pop(split).name} has no labels, and is left out.")
            splits = {name: file.name for name, file in files.items()}
    texts = [name for key, name in named.items() if key not in _OF_LABELS]
    if lacks := [name for name in texts if name not in train.rows]:
        raise _unlike(train, lacks[0], told)
    usual = Columns().model_dump()
    own = {key: name for key, name in named.items() if usual[key] != name}
    if own == {"text": "text_a", "text_b": "text_b"}:
        own = {}  # taken without naming them
    rows = list(zip(*(train.rows[name] for name in texts), strict=True))
    some = [_texts(row) for row in rows[:: max(1, len(rows) // LENGTHS)]]
    return Guess(task, own, splits, tuple(files), some, told is train, notes)


def _unlike(table: _Table, lacks: str | None, other: _Table, near: str = "") -> UserError:
    return UserError(
        f"{table.reader.name}: no column {lacks!r}, which {other.reader.name} has.{near} Call the "
        "columns alike in all files."
    )


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
    found = {"train": files[trains[0]]}  # own_train beside own_val
    for name, split in {"validation": "validation", "test": "test", **USUAL_NAMES}.items():
        other = re.sub("train", name, trains[0], flags=re.IGNORECASE)
        if other in files:
            found.setdefault(split, files[other])
    return {split: file.name for split, file in found.items()}, found


def _texts(fields: Sequence[Any]) -> list[str]:
    flat = [item for one in fields for item in (one if isinstance(one, list) else [one])]
    return [str(item) for item in flat if item is not None]


class _Table:
    """The first rows of a file."""

    def __init__(self, file: Path, options: DataOptions) -> None:
        self.options, self.reader = options, open_file(file)
        names = self.reader.columns()
        rows = [row for _, row in islice(self.reader.rows(names), ROWS)]
        if not rows:
            raise UserError(f"{self.reader.name}: no rows. Put at least one example there.")
        self.rows: dict[str, list[Any]] = {}
        """By column, of each row; in CSV lists, where all are their JSON."""
        self.values: dict[str, list[Any]] = {}
        """The same without those that are empty, or -1 in all rows."""
        for name in names:
            own = [row.get(name) for row in rows]
            lists = [as_list(value, self.reader) for value in own]
            are_lists = all(isinstance(one, list) for one in lists if one is not None)
            self.rows[name] = lists if are_lists else own
            filled = [value for value in self.rows[name] if value not in (None, "")]
            nothing = {*map(str, filled)} in ({"-1"}, {"-1.0"})
            self.values[name] = [] if nothing else filled

    def shape(self, name: str) -> str:
        """What a column holds: "" for nothing, or what is none of these."""
        values = self.values[name]
        if not values:
            return ""
        if all(isinstance(value, list) for value in values):
            return "lists"
        if self.reader.label_names(name) is not None:
            return "classes"
        numbers = [self._number(value) for value in values]
        if None not in numbers:
            whole = all(number is not None and number.is_integer() for number in numbers)
            return "whole numbers" if whole else "numbers"
        return "texts" if all(isinstance(value, str) for value in values) else ""

    def _number(self, value: Any) -> float | None:
        if isinstance(value, bool) or (isinstance(value, str) and not self.reader.numbers_are_text):
            return None
        try:
            return float(value)
        except (TypeError, ValueError):
            return None

    def columns_of_task(self) -> tuple[str, dict[str, str]]:
        """The task, and its columns by their keys."""
        asked, names = self.options.task, self.values.keys()
        tasks: tuple[str, ...] = ()
        columns: dict[str, str] = {}
        if asked == "masked-lm":
            tasks, columns = (asked,), _as_pair(self._text_columns())
        elif {"question", "context", "answers"} <= names and self._may_be("answers"):
            tasks, columns = _QUESTIONS, {key: key for key in ("question", "context", "answers")}
        elif "tokens" in names and (tags := self._tags()):
            tag = "tags" if "tags" in tags else _only("Which column has the tags?", tags, "--label")
            tasks, columns = _WORDS, {"tokens": "tokens", "tags": tag}
        elif "spans" in names and self._may_be("spans"):
            tasks, columns = _WORDS, {"text": self._text_columns()[0], "spans": "spans"}
        elif asked in (None, *_TEXTS):
            label = self._label_column()
            columns = {**_as_pair(self._text_columns(label)), "label": label}
            tasks = (self._task_of(label), *_TEXTS)
        if asked not in (None, *tasks):
            raise UserError(
                f"{self.reader.name}: no columns of the task {asked} (columns: "
                f"{', '.join(names)}). docs/data.md says which it needs, and their names."
            )
        return asked or tasks[0], columns

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
        lengths, asked = [*map(len, self.values["tokens"])], self.options.label
        return [
            name
            for name, lists in self.values.items()
            if name != "tokens" and self.shape(name) == "lists" and asked in (None, name)
            if [*map(len, lists)] == lengths
            if self.reader.label_names(name) is not None
            or all(isinstance(item, str) for one in lists for item in one)
        ]

    def _task_of(self, label: str) -> str:
        shape, several = self.shape(label), len({*map(str, self.values[label])})
        if shape == "whole numbers" and several > MOST_CLASSES:
            return "regression"
        return {"lists": "multi-label", "numbers": "regression"}.get(shape, "single-label")

    def _label_column(self) -> str:
        if (given := self.options.label) is not None:
            return self._known("--label", given)
        filled = [name for name, values in self.values.items() if values]
        possible = [name for name in filled if name in LABEL_NAMES[:2]]
        possible = sorted(possible)[:1] or [name for name in filled if name.lower() in LABEL_NAMES]
        possible = possible or [name for name in filled if self._recur(name)]
        if not possible:
            raise UserError(
                f"{self.reader.name}: no column looks like labels (columns: "
                f"{', '.join(self.values)}). Name it: --label COLUMN; or, for texts alone, --task "
                "masked-lm."
            )
        return _only("Which column has the labels?", possible, "--label")

    def _known(self, option: str, name: str) -> str:
        """A column that the user names."""
        if name not in self.values:
            columns = ", ".join(self.values)
            raise UserError(f"{option} {name}: {self.reader.name} has the columns {columns}.")
        return name

    def _recur(self, name: str) -> bool:
        """Whether a column has few different values, as labels are, or names of its numbers."""
        values, shape = self.values[name], self.shape(name)
        few = 1 < len({*map(str, values)}) <= max(2, min(100, len(values) // 5))
        return shape == "classes" or (shape in ("texts", "whole numbers", "lists") and few)

    def _text_columns(self, label: str | None = None) -> list[str]:
        """One column, or two of a pair."""
        if self.options.text:
            return [self._known("--text", name) for name in self.options.text[:2]]
        texts = [name for name in self.values if self.shape(name) == "texts" and name != label]
        usual = [[name] for known in TEXT_NAMES for name in texts if name.lower() == known]
        pairs = [[*pair] for pair in PAIRS if {*pair} <= {*texts}]
        for found in (*pairs, *usual):
            return found
        if not texts:
            raise UserError(f"{self.reader.name}: no column holds texts. Name it: --text COLUMN.")
        return [_only("Which column has the text?", texts, "--text")]


_QUESTIONS = ("extractive-qa", "character-spans")
_WORDS = ("token-classification",)
_TEXTS = ("single-label", "multi-label", "regression")
"""Tasks of the same columns, the one that is guessed first."""


def _only(what: str, options: Sequence[str], flag: str) -> str:
    """Raises UserError for more than one, and names the option that says which."""
    if len(options) > 1:
        raise UserError(f"{what} It may be {', '.join(options)}. Say which: {flag} COLUMN.")
    return options[0]


def _as_pair(texts: Sequence[str]) -> dict[str, str]:
    return dict(zip(("text", "text_b"), texts, strict=False))


# ------------------------------------------------------------------------------- the recipe

_LONGEST = {"masked-lm": 128, "extractive-qa": 384, "character-spans": 384}
"""Tokens, where longer texts are read in windows; all others are cut at 512."""
_WITH_CLASSES = ("single-label", "multi-label", "token-classification")


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher that the user names."""

    name: str
    model: str
    config: PreTrainedConfig | None = None
    """None of the default teacher, which is not read."""
    outputs: list[str] = field(default_factory=list)
    """What its head calls its classes, as the data spell them; empty where it has none."""
    has_head: bool = False

    @property
    def labels(self) -> list[str] | None:
        """None where its outputs have no names."""
        return None if not self.outputs or are_generic(self.outputs) else self.outputs

    def knows_in_part(self, labels: Sequence[str]) -> bool:
        return self.labels is not None and not {*labels} <= {*self.labels}

    def mapped(self, labels: Sequence[str]) -> tuple[dict[str, str | None], str]:
        """Its labels to the task's, where these are not the same, and a comment."""
        known: dict[str, str | None] = {}
        if self.labels is None and len(self.outputs) == len(labels):
            known |= zip(self.outputs, labels, strict=True)
            return known, "guessed: its outputs have no names"
        if self.labels not in (None, [*labels]):
            known |= {name: name if name in labels else None for name in self.outputs}
        count = sum(label is not None for label in known.values())
        return known, f"it knows {count} of the {len(labels)} labels"


def read_teachers(
    references: Sequence[str], task: str, labels: Sequence[str]
) -> list[TeacherFacts]:
    """labels: the data's. Raises UserError for a folder that is no model."""
    if not references:
        return [TeacherFacts("teacher", DEFAULT_TEACHER)]
    found = []
    for number, reference in enumerate(references, 1):
        name = f"teacher-{number}" if len(references) > 1 else "teacher"
        config, outputs = load_config(resolve_model(reference)), list[str]()
        try:
            check_head(reference, config, TASKS[task])
            has_head = bool(getattr(config, "architectures", None))
        except UserError:
            has_head = False
        if has_head and task in _WITH_CLASSES:
            outputs = _spelt_as(labels, class_names(config))
        found.append(TeacherFacts(name, reference, config, outputs, has_head))
    return found


def _spelt_as(labels: Sequence[str], own: list[str]) -> list[str]:
    """A teacher's labels as the data spell them, where only capitals differ."""
    spelt = {label.lower(): label for label in labels}
    lower = [label.lower() for label in own]
    if {*spelt} != {*lower} or not len(spelt) == len(lower) == len(labels):
        return own
    return [spelt[label] for label in lower]


def recipe_text(guess: Guess, data: str, references: Sequence[str], student: str | None) -> str:
    """The recipe's YAML, with comments. data: its path, as it will stand there.

    Raises UserError where neither train nor a teacher names the labels, and where a split has
    others than train.
    """
    with_classes = guess.task in _WITH_CLASSES
    in_data = _labels_in(guess, data) if with_classes else []
    teachers = read_teachers(references, guess.task, in_data)
    fresh = [one.name for one in teachers if not one.has_head]
    labels, whose = _labels(guess, data, teachers, in_data) if with_classes else ([], "")
    length, why = _max_length(guess, teachers[0])
    environment = jinja2.Environment(keep_trailing_newline=True, autoescape=False)
    environment.filters["yaml"] = one_line
    template = Path(__file__).with_name("recipe.yaml.jinja").read_text(encoding="utf-8")
    depth = 24 if teachers[0].config is None else int(teachers[0].config.num_hidden_layers)
    kept = max(1, depth // 2 if depth <= 12 else depth // 4)
    return environment.from_string(template).render(
        name=Path(data).name,
        guess=guess,
        data=data,
        labels=labels,
        whose=whose,
        of_entities=are_entities(labels),
        length=length,
        why=why,
        teachers=teachers,
        student=student,
        layers=[(number + 1) * depth // kept - 1 for number in range(kept)],
        depth=depth,
        fresh=fresh,
        partial=any(one.knows_in_part(labels) for one in teachers),
        routed=len(teachers) > 1 and "validation" in guess.has and with_classes,
    )


def _labels(
    guess: Guess, data: str, teachers: Sequence[TeacherFacts], labels: list[str]
) -> tuple[list[str], str]:
    """The task's labels, in the order of the first teacher that knows these; and whose they are."""
    named = [one.labels for one in teachers if one.labels is not None]
    if not guess.labelled and not named:
        raise UserError(
            f"{data}: train has no labels, and no --teacher names its own. Name a teacher that "
            "does (id2label in config.json)."
        )
    more = guess.task == "token-classification"  # a tagger may know types that the data do not have
    for own in named:
        if {*own} == {*labels} or (more and {*own} > {*labels}):
            return own, "of the teachers, in their order"
    return labels, "in train" if guess.labelled else "of validation or test"


def _labels_in(guess: Guess, data: str) -> list[str]:
    """Those of train. Other splits are read by them here: in the recipe they will be listed in an
    order, by which a number would be a class id. Where train has none, those of the others."""
    others = [split for split in guess.has if split != "train"]
    splits = guess.splits if guess.labelled else {**guess.splits, "train": guess.splits[others[0]]}
    columns = {"path": data, "columns": guess.columns, "splits": splits}
    task: Any = TASKS[guess.task].model_validate({"type": guess.task, "data": columns})
    source = open_files(task, None, None)
    for split in others:
        source.read(split)
    return source.labels


def _max_length(guess: Guess, teacher: TeacherFacts) -> tuple[int, str]:
    """In tokens, and where it comes from: the length that 99 of 100 examples do not exceed."""
    texts, config = [" ".join(parts) for parts in guess.texts], teacher.config
    most = _LONGEST.get(guess.task, 512)
    lengths = [math.ceil(1.4 * len(text.split())) + 3 for text in texts]
    by = "an estimate from the words"
    if config is not None:
        tokenizer = load_tokenizer(resolve_model(teacher.model))
        lengths = [len(ids) + 1 for ids in tokenizer(texts, truncation=False)["input_ids"]]
        most, by = min(most, usable_length(config) or most), f"tokens of {teacher.name}"
    wanted = int(np.quantile(lengths, 0.99))
    rounded = min(most, max(32, 8 * math.ceil(wanted / 8)))
    return rounded, f"99% of {len(lengths):,} texts have at most {wanted}: {by}"
