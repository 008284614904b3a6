"""Where examples come from: files, hub data sets, docstrings; all alike once opened.

A split is converted once to an Arrow file (text, class id, content key), which `datasets`
maps into memory; the file's name is a hash of all it depends on.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import xxhash

from ds_distill.data.columns import BATCH, as_numpy, build_once, example_keys, keep_per_class
from ds_distill.data.groups import ID, MARKS, NAMED, TEACHER, with_marks
from ds_distill.data.labels import distinct_labels, is_labelled, read_labels
from ds_distill.data.readers import SUFFIXES, HubSplit, Reader, file_suffix, open_file
from ds_distill.data.row_forms import ROW_FORMS, RowForm
from ds_distill.errors import UserError, did_you_mean
from ds_distill.files import files_beside
from ds_distill.recipe.tasks import Task, key_of, labels_named

Progress = Callable[[int, int], None]
"""Called as (files read, files in all)."""

ContentKey = tuple[int, int]
"""A content key."""

VERSION = 2
"""Part of the converted files' names: raise it when the same input gives other rows."""


def open_files(task: Task, cache_folder: Path | None, progress: Progress | None) -> Source:
    path = task.data.path
    local = Path(path).expanduser()
    if local.is_dir():
        return ReaderSource(task, cache_folder, folder_splits(task, local), local)
    for split, name in task.data.own_splits().items():
        raise UserError(
            f"{key_of(task, 'data.path')}={path} is one file, which is "
            "split train. Give the folder as the path to name several files in it.",
            at=f"{key_of(task, f'data.splits.{split}')}={name}",
        )
    return ReaderSource(task, cache_folder, {"train": local}, local.parent)


def open_hub(task: Task, cache_folder: Path | None, progress: Progress | None) -> Source:
    return ReaderSource(task, cache_folder, hub_splits(task, cache_folder), None)


class Source(ABC):
    """Splits of labelled or unlabelled examples."""

    splits: list[str]
    """Names of the splits that are there."""
    fewest_labels = 2
    """Of those that are found in its examples."""
    names_minus_one = False
    """Whether -1 is one of those, and not the mark of an example without a label."""

    def __init__(self, task: Task, cache_folder: Path | None) -> None:
        self.task = task
        self.cache_folder = cache_folder or Path(datasets.config.HF_DATASETS_CACHE) / "ds_distill"

    @cached_property
    def labels(self) -> list[str]:
        """Label names in the order of the class ids; none where the task has no classes. Raises
        UserError where it has, and they cannot be found."""
        labels = self.task.given_labels
        return self._label_names() if labels is None else labels

    @property
    def found_labels(self) -> bool:
        """Whether the labels are those of the examples in train, which says of no class id whose it
        is."""
        return False

    @abstractmethod
    def _label_names(self) -> list[str]:
        """Those of a task whose recipe does not give them."""

    @abstractmethod
    def _examples(self, split: str) -> datasets.Dataset:
        """All examples of a split; a column `class` where `label` hides the class, and `group`
        where something says which belong together: int64, null for those that are alone."""

    def marked(self, split: str) -> datasets.Dataset:
        """The same with the columns of groups; see `with_marks`."""
        return with_marks(self._examples(split), self.cache_folder)

    @abstractmethod
    def no_labels(self, split: str) -> UserError:
        """Why a split has no labels, and what to do."""

    def read(self, split: str, need_labels: bool = False) -> datasets.Dataset:
        """A split's examples, in the order of the file.

        Columns: `text`, str; `text_b`, str, where the recipe names its column; `label`,
        int64: class id, or -1 in every row of a split without labels; in a task of numbers
        float32, the number; `key_hi` and `key_lo`, int64: the content key; of words `widened`, see
        `ds_distill.data.columns.WORDS`; `copy` and `group`: see
        `ds_distill.data.groups`. `task.data.per_class` and `task.data.limit` are applied.

        Raises UserError when the split is not there, a row breaks a rule, or the split has
        no labels and `need_labels` is set.
        """
        self._check_split(split, f"Pick one of these with e.g. phases.PHASE.split={self.splits[0]}")
        data = self.marked(split)
        if need_labels and not has_labels(data):
            raise self.no_labels(split)
        cap = self.task.data.per_class.get(split)
        if cap is not None:
            data = data.select(keep_per_class(self._classes(split, data), example_keys(data), cap))
        data = limited(data, self.task.data.limit.get(split))
        names = ("text", "text_b", "words", "answers", "label", "key_hi", "key_lo", "widened")
        there = [name for name in (*names, *MARKS, TEACHER, *ID) if name in data.column_names]
        return data.select_columns(there)

    def _classes(self, split: str, data: datasets.Dataset) -> np.ndarray:
        """The class of each example: int64 [N]. Raises UserError where it has not one."""
        key, kind = f"data.per_class.{split}", f"{key_of(self.task, 'type')}={self.task.type}"
        if self.task.many_labels or self.task.of_words:
            has = "has any number of them" if self.task.many_labels else "has one for each word"
            raise UserError(
                f"caps the examples of each class, and with {kind} an example {has}. Set "
                f"{key_of(self.task, f'data.limit.{split}')} instead.",
                at=key_of(self.task, key),
            )
        hidden = "class" in data.column_names
        if not hidden and not self.labels:
            raise UserError(
                f"caps the examples of each class, and {kind} has no classes. Take the key out.",
                at=key_of(self.task, key),
            )
        classes = as_numpy(data, "class" if hidden else "label")
        if classes[0] < 0:
            raise self.no_labels(split)
        return classes

    def locations(self, split: str, keys: Set[ContentKey]) -> dict[ContentKey, str]:
        """Where examples with these content keys stand, e.g. `train.jsonl:17`, for a message: the
        first of those with the same text, and none where that cannot be determined."""
        return {}

    def _check_split(self, split: str, fix: str) -> None:
        if split not in self.splits:
            named = key_of(self.task, f"data.splits.{split}")
            raise UserError(
                f"there is no split {split!r}. It has: "
                f"{', '.join(self.splits)}.{did_you_mean(split, self.splits)} {fix}, or say "
                f"where it is with {named}=NAME.",
                at=f"{key_of(self.task, 'data.path')}={self.task.data.path}",
            )

    def _check_named_splits(self) -> None:
        for key in ("per_class", "limit"):
            for split in getattr(self.task.data, key):
                named = key_of(self.task, f"data.{key}.{split}")
                self._check_split(split, f"Take {named} out of the recipe")


class ReaderSource(Source):
    """Files or hub splits, one reader per split."""

    def __init__(
        self,
        task: Task,
        cache_folder: Path | None,
        locations: Mapping[str, Path | Reader],
        folder: Path | None,
    ) -> None:
        """locations: split to a file's path or to a reader. folder: where labels.json may be."""
        super().__init__(task, cache_folder)
        if folder is not None and task.data.config is not None:
            raise UserError(
                "only hub data sets have configurations, and "
                f"{key_of(task, 'data.path')}={task.data.path} is local. Take the key out.",
                at=f"{key_of(task, 'data.config')}={task.data.config}",
            )
        self.splits = list(locations)
        self._locations = locations
        self._folder = folder
        self._forms: dict[str, RowForm] = {}
        self._check_named_splits()

    def _label_names(self) -> list[str]:
        return self._declared_labels or self._labels_in_train()

    @property
    def found_labels(self) -> bool:
        return self.task.given_labels is None and not self._declared_labels

    @cached_property
    def _declared_labels(self) -> list[str] | None:
        if self._folder is not None and (self._folder / "labels.json").is_file():
            return read_labels(self._folder / "labels.json")
        for split in self.splits:
            with suppress(UserError):  # told where the split is read, if it is
                form = self._form(split)
                names = form.reader.label_names(form.label_column)
                if names is not None:
                    return names
        return None

    def _labels_in_train(self) -> list[str]:
        named = labels_named(self.task)
        self._check_split("train", f"Without it the label names must be given: {named}")
        form = self._form("train")
        if not form.has_labels:
            raise self.no_labels("train")
        if (tags := form.tags()) is not None:
            return tags
        reader, column = form.reader, form.label_column
        names = distinct_labels(self.task, reader, column, minus_one=self.names_minus_one)
        if len(names) < self.fewest_labels:
            raise UserError(
                f"column {column!r} holds {len(names)} different label(s) ({', '.join(names)}), "
                f"and a task needs at least two; -1 is none. Give all of them with {named}, or the "
                f"right column with {key_of(self.task, f'data.columns.{form.label_key}')}=NAME.",
                at=reader.name,
            )
        return names

    def _form(self, split: str) -> RowForm:
        if split not in self._forms:
            found = self._locations[split]
            reader = open_file(found) if isinstance(found, Path) else found
            self._forms[split] = ROW_FORMS[self.task.rows](self.task, reader)
        return self._forms[split]

    def _examples(self, split: str) -> datasets.Dataset:
        form = self._form(split)
        for key, name in form.key_columns.items():
            if name not in form.reader.columns():
                raise self._missing_column(form, key, name)
        columns = {key: getattr(self.task.data.columns, key) for key in NAMED}
        named = {
            key: name
            for key, name in columns.items()
            if name is not None and self._has(form, key, name)
        }
        labels = self.labels if form.has_labels else []
        unordered = self.found_labels
        state = [VERSION, form.reader.fingerprint(), unordered, named, *form.state(labels)]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(state).encode())
        file = self.cache_folder / f"examples-{digest}.arrow"
        convert = partial(form.convert, labels, unordered=unordered, named=named)
        return datasets.Dataset.from_file(str(build_once(file, convert)))

    def _has(self, form: RowForm, key: str, column: str) -> bool:
        """Whether the rows of a split name their groups, teachers, or ids: it need not, where
        another does; groups only without labels. Raises UserError for one that must."""
        if column in form.reader.columns():
            return True
        elsewhere = any(column in self._form(split).reader.columns() for split in self.splits)
        if (key == "group" and form.has_labels) or not elsewhere:
            raise self._missing_column(form, key, column)
        return False

    def locations(self, split: str, keys: Set[ContentKey]) -> dict[ContentKey, str]:
        places: dict[ContentKey, str] = {}
        with suppress(UserError, OSError, KeyError):  # the files are others by now
            form = self._form(split)
            rows = form.reader.rows([*form.key_columns.values()])
            while places.keys() < keys and (batch := list(islice(rows, BATCH))):
                found = form.keys([form.fields(row, location) for location, row in batch])
                for (location, _), key in zip(batch, map(tuple, found.tolist()), strict=True):
                    if key in keys:
                        places.setdefault(key, location)
        return places

    def no_labels(self, split: str) -> UserError:
        form = self._form(split)
        if not form.has_labels:
            return self._missing_column(form, form.label_key, form.label_column)
        return UserError(
            f"{form.reader.name}: split {split!r} has no labels (column {form.label_column!r} is "
            "empty, or -1), and they are needed here. Choose a split with labels, or fill the "
            "column."
        )

    def _missing_column(self, form: RowForm, key: str, name: str) -> UserError:
        present, named = form.reader.columns(), key_of(self.task, f"data.columns.{key}")
        return UserError(
            f"no column {name!r} ({named}).{did_you_mean(name, present)} It has: "
            f"{', '.join(present)}. Choose one with {named}=NAME.",
            at=form.reader.name,
        )


def limited(data: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """So many examples, chosen as `keep_per_class` does; all without a limit."""
    if limit is None:
        return data
    one_class = np.zeros(len(data), dtype=np.int64)
    return data.select(keep_per_class(one_class, example_keys(data), limit))


def has_labels(data: datasets.Dataset) -> bool:
    """Whether a split has labels: all of its rows have, or none."""
    return bool(is_labelled(as_numpy(data.select(range(1)), "label"))[0])


# ------------------------------------------------------------------------------------------ splits


USUAL_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}


def folder_splits(task: Task, folder: Path) -> dict[str, Path]:
    """The file of each split in a folder: as `task.data.splits` says, else by the files' names.

    Raises UserError where a split has no file, or several.
    """
    files = {
        path.name: path
        for path in sorted(folder.iterdir())
        if file_suffix(path) and path.is_file() and path.name[0] != "."
        if path.name != "labels.json"
    }
    if not files:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise UserError(
            f"no data file in this folder (it holds: {there}). Put one "
            f"file per split there, e.g. train.jsonl; endings: {', '.join(SUFFIXES)}.",
            at=f"{key_of(task, 'data.path')}={folder}",
        )
    stems = {name: name[: -len(file_suffix(path) or "")] for name, path in files.items()}
    by_split: dict[str, list[str]] = {}
    if named := task.data.own_splits():
        for split, wanted in named.items():
            by_split[split] = [name for name in files if wanted in (name, stems[name])]
            if not by_split[split]:
                raise wrong_split(task, split, wanted, list(files), [*files, *stems.values()])
    else:
        for name, stem in stems.items():
            usual = USUAL_NAMES.get(stem.lower(), stem)
            by_split.setdefault(usual, []).append(name)
    for split, names in by_split.items():
        if len(names) > 1:
            choice = key_of(task, f"data.splits.{split}")
            raise UserError(
                f"several files could be split {split!r}: "
                f"{', '.join(names)}. Choose with {choice}={names[0]}.",
                at=f"{key_of(task, 'data.path')}={folder}",
            )
    return {split: files[by_split[split][0]] for split in in_order(by_split)}


def in_order(splits: Iterable[str]) -> list[str]:
    """train, validation and test first, then the others as they come."""
    usual = ("train", "validation", "test")
    names = list(splits)
    return [s for s in usual if s in names] + [s for s in names if s not in usual]


def hub_splits(task: Task, cache_folder: Path | None) -> dict[str, Reader]:
    """The splits of a hub data set, which `datasets` loads or downloads.

    Raises UserError where it cannot be loaded, or has no such split.
    """
    path, config = task.data.path, task.data.config
    near = did_you_mean(Path(path).name, files_beside(Path(path).expanduser()))
    no_hub_id = path.startswith((".", "/", "~")) or path.count("/") > 1 or ":" in path
    # `csv` and the like are loaders of `datasets`, which would take files of this folder.
    loaders = getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())
    if no_hub_id or path in loaders or file_suffix(Path(path)):
        raise UserError(
            f"no such file or folder.{near} "
            "Give a folder, a file, data:NAME, the id of a hub data set, or "
            "docstrings:PACKAGE,PACKAGE.",
            at=f"{key_of(task, 'data.path')}={path}",
        )
    try:
        splits = datasets.load_dataset(
            path, config, cache_dir=str(cache_folder) if cache_folder else None
        )
    except Exception as error:  # many kinds: connection, authentication, not found, config
        reason = " ".join(str(error).split())[:300].rstrip(".")
        name = f"{path} (configuration {config})" if config else path
        raise UserError(
            "this is no local file or folder, and the hub data set "
            f"{name} could not be loaded: {reason}.{near} Check the name and the connection, or "
            "give a local path.",
            at=f"{key_of(task, 'data.path')}={path}",
        ) from error
    names = task.data.own_splits() or {USUAL_NAMES.get(name, name): name for name in splits}
    for split, name in names.items():
        if name not in splits:
            raise wrong_split(task, split, name, list(splits))
    return {split: HubSplit(splits[name], f"{path}, split {name}") for split, name in names.items()}


def wrong_split(
    task: Task, split: str, wanted: str, there: list[str], accepted: list[str] | None = None
) -> UserError:
    """A split that the recipe names and the data do not have.

    there: what may be named; accepted: all that would be understood, to find the nearest in.
    """
    return UserError(
        f"not there.{did_you_mean(wanted, accepted or there)} Choose one of: {', '.join(there)}.",
        at=f"{key_of(task, f'data.splits.{split}')}={wanted}",
    )
