"""Where a task's examples come from, and by what a path is of which source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ds_distill.recipe.part import Implemented
from ds_distill.recipe.section import (
    BY_FORM,
    LIST,
    PLAIN,
    SECTION,
    Count,
    LabelMap,
    Name,
    Section,
    Several,
)


class Columns(Section):
    """The names of the columns that hold an example."""

    text: str = "text"
    """The text, or the first of two. Data with columns `text_a` and `text_b` and no `text` are
    pairs without naming them here."""
    text_b: str | None = None
    """The second text of a pair."""
    label: str = "label"
    """The label: a name, true or false, or for hub data sets the class id. Absent in unlabelled
    splits."""
    tokens: str = "tokens"
    """Of token classification: the words, a list of texts. Data without it have `text`, which is
    cut at white space, at punctuation marks, and around each Chinese character, kana, Thai, Lao,
    Khmer or Burmese letter."""
    tags: str = "tags"
    """Of token classification: a tag for each of `tokens`. Absent in unlabelled splits."""
    spans: str = "spans"
    """Of token classification: the entities in `text`, a list of {start, end, type}: first
    character, and the one after the last. Absent in unlabelled splits."""
    question: str = "question"
    """Of extractive QA and character spans: the question."""
    context: str = "context"
    """Of these: the text in which its answer is."""
    answers: str = "answers"
    """Of these: the right answers, a list of {text, start}: `text` stands in the context from
    character `start` on; or {text: [...], answer_start: [...]}, as SQuAD has them on the hub. Of
    character spans also {start, end}, or the string `start end;start end` for an answer in several
    parts; the list may be empty. Absent in unlabelled splits."""
    group: str | None = None
    """What an example is of, such as a document, a patient or a thread: a name or a whole number,
    null for one that is alone. Examples of one group are on one side of every split that is made
    here, and intervals resample groups. Near-copies of a text, contexts and files of docstrings are
    groups without it. May be absent in unlabelled splits."""
    teacher: str | None = None
    """The teacher that an example follows, for the routing policy `column`: its name in the recipe,
    null where none is meant. May be absent in splits from which no student learns that way."""
    id: str | None = None
    """What names an example, for a teacher's file of predictions that has this column: a name or a
    whole number, null for an example without one. May be absent in some splits."""


class Randomise(Section):
    """Random texts in place of the real ones, which are not labelled: as many, each as long as the
    real one, of words drawn by how often they occur in all of them. Of a pair that is the second
    text, the passage; the first is a question: a starter, then words of that passage. Text number
    i depends on the seed, on i and on the real texts."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """A seed of its own, so that runs with different `seed`s can share a cache."""
    starters: Annotated[list[str], Field(min_length=1)] = Field(
        default_factory=lambda: ["is", "are", "what", "how", "does", "can"]
    )
    """First words of questions, each as likely. Default: is, are, what, how, does, can."""
    words: Count = 8
    """Words of a question after the starter."""


class SplitFrom(Section):
    """A split of this task whose examples come from other data."""

    path: str
    """As the task's own `path`."""
    config: str | None = None
    """The configuration of a hub data set."""
    split: str | None = None
    """The file's name in the folder, or the hub's split. Default: train, or the one file."""
    columns: Columns = Columns()
    labels: (
        Annotated[Annotated[LabelMap, SECTION] | Annotated[Literal["none"], PLAIN], BY_FORM] | None
    ) = None
    """`none`: the labels of these data are not read. Or a label there to this task's label, e.g.
    {false: no, true: yes}; one that maps to null leaves its rows out. Default: they have this
    task's labels, by name, or none at all."""
    limit: Count | None = None
    """So many of its examples at most, chosen by their own keys. Default: all."""
    randomise: Randomise | None = None
    """Random texts made of these."""

    @model_validator(mode="after")
    def _random_texts_have_no_labels(self) -> SplitFrom:
        if self.randomise is not None and isinstance(self.labels, dict):
            raise ValueError("random texts have no labels: leave `labels` out")
        return self


class Folds(Section):
    """One fold of a cross-validation, for data that have no test split of their own: the examples
    of fold number `fold` are the split `test`, the others stay where they are. The fold of an
    example depends on its text, and examples of one group (`columns.group`) are in one fold."""

    number: Annotated[int, Field(ge=2, le=100, strict=True)] = 10
    """How many folds there are."""
    fold: Count
    """Which of them is tested, from 1."""
    of: Annotated[Several[Name], Field(min_length=1)] = Field(default_factory=lambda: ["train"])
    """The splits that have folds. If `test` is one of them, its examples of other folds are in the
    first split named here."""

    @model_validator(mode="after")
    def _fits(self) -> Folds:
        if self.fold > self.number:
            raise ValueError(f"fold {self.fold} of {self.number}: choose one from 1 on")
        if self.of[0] == "test":
            raise ValueError("of: name the split that is trained on first, e.g. [train, test]")
        if len(set(self.of)) < len(self.of):
            raise ValueError("of: names a split twice")
        return self


Split = Annotated[
    Annotated[str, PLAIN]
    | Annotated[SplitFrom, SECTION]
    | Annotated[Annotated[list[SplitFrom], Field(min_length=1)], LIST],
    BY_FORM,
]


class Data(Section):
    """Where the examples come from."""

    path: str
    """A folder, a file, `data:NAME` (the folder or file NAME in `data_folder`), a data set of the
    hub, or `docstrings:PACKAGE,PACKAGE` (see `ds_distill.data.docstrings`). Folders hold one file
    per split: jsonl, csv, tsv, parquet, conll, or txt with one text per line; also gzipped."""
    config: str | None = None
    """The configuration of a hub data set."""
    columns: Columns = Columns()
    splits: dict[Name, Split] = Field(default_factory=dict)
    """Our split's name to the file's name in the folder, or to the hub's split; or to a section,
    for a split from other data, or a list of them, for the examples of all. If no file is named
    here, train, validation, test (and what else is there) are found by their usual names."""
    folds: Folds | None = None
    """Cross-validation. Default: the splits as they are."""
    per_class: dict[Name, Count] = Field(default_factory=dict)
    """Split to the number of examples that are used of each class (of docstrings: each package),
    chosen by the examples' own keys: the same ones on every machine."""
    limit: dict[Name, Count] = Field(default_factory=dict)
    """Split to the number of examples that are used at most, chosen likewise, after `per_class`."""

    def own_splits(self) -> dict[str, str]:
        """Those of `splits` that are in the data themselves: our name to theirs."""
        return {name: split for name, split in self.splits.items() if isinstance(split, str)}

    def splits_from(self) -> dict[str, list[SplitFrom]]:
        """Those of `splits` that come from other data: from where, in their order."""
        found = {name: s for name, s in self.splits.items() if not isinstance(s, str)}
        return {name: s if isinstance(s, list) else [s] for name, s in found.items()}


DOCSTRINGS = "docstrings:"
"""What a path of docstrings begins with."""

SOURCES: dict[str, type[DataSource]] = {}


class DataSource(Implemented):
    """Where examples come from. It runs a function (task, cache_folder, progress) ->
    `ds_distill.data.sources.Source`."""

    kind_of_part = "source"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        SOURCES[cls.part_name] = cls

    @classmethod
    def recognises(cls, path: str) -> bool:
        """Whether a recipe's `data.path` is of this source."""
        return False


class Docstrings(DataSource):
    part_name, runs = "docstrings", "ds_distill.data.docstrings:DocstringSource"

    @classmethod
    def recognises(cls, path: str) -> bool:
        return path.startswith(DOCSTRINGS)


class Files(DataSource):
    part_name, runs = "files", "ds_distill.data.sources:open_files"

    @classmethod
    def recognises(cls, path: str) -> bool:
        file = Path(path).expanduser()
        return os.path.isdir(file) or os.path.isfile(file)  # False of a name no file can have


class Hub(DataSource):
    """What no other source recognises."""

    part_name, runs = "hub", "ds_distill.data.sources:open_hub"


def source_of(path: str) -> type[DataSource]:
    """The source that a recipe's `task.data.path` is of."""
    return next((source for source in SOURCES.values() if source.recognises(path)), Hub)
