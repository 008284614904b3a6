"""The source that a task's data describe: the data themselves, splits from other data, folds; and
random texts in place of real ones (Krishna and others, Thieves on Sesame Street, ICLR 2020)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash

from ds_distill.data.columns import (
    BATCH,
    QUESTIONS,
    as_numpy,
    build_once,
    flat_lists,
    text_schema,
    write_columns,
)
from ds_distill.data.groups import Groups, of_whole_example, with_marks
from ds_distill.data.labels import LabelNames, label_array
from ds_distill.data.sources import ContentKey, Progress, Source, has_labels, in_order, limited
from ds_distill.errors import UserError
from ds_distill.keys import content_keys, hash_keys
from ds_distill.recipe.data import Folds, Randomise, SplitFrom, source_of
from ds_distill.recipe.references import resolve_data
from ds_distill.recipe.tasks import MaskedLM, Task, Untagged, key_of

FOLD = 105
"""Purpose of the hashes that assign examples to folds."""

_TEST = "test"
_UNKNOWN, _LEFT_OUT = -3, -2


def open_source(
    task: Task,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
    data_folder: str | None = None,
) -> Source:
    """The source that `task.data` describes; nothing large is read yet.

    A single file is the split train. Label names are looked for in labels.json beside the
    files, then in the files (parquet written by `datasets`), then among the labels of train.

    cache_folder: where downloads and converted files are kept, the default being the cache
    of `datasets`. progress: called while docstrings are extracted. data_folder: the recipe's.

    Raises UserError when a path or a split that the recipe names is not there.
    """

    def source_at(task: Task) -> Source:
        path = resolve_data(task.data.path, data_folder)
        data = task.data.model_copy(update={"path": path})
        resolved = task.model_copy(update={"data": data})
        source: Source = source_of(path).load()(resolved, cache_folder, progress)
        return source

    if task.data.folds is None and not task.data.splits_from():
        return source_at(task)
    return CombinedSource(task, cache_folder, source_at)


class CombinedSource(Source):
    """The task's own data, with splits from other data, or with folds."""

    def __init__(
        self, task: Task, cache_folder: Path | None, source_at: Callable[[Task], Source]
    ) -> None:
        """source_at: opens data without either."""
        super().__init__(task, cache_folder)
        data = task.data
        plain = {"splits": data.own_splits(), "folds": None, "per_class": {}, "limit": {}}
        self._own = source_at(task.model_copy(update={"data": data.model_copy(update=plain)}))
        self._others = {
            name: [
                _Other(f"{name}.{number}" if len(parts) > 1 else name, split, self, source_at)
                for number, split in enumerate(parts)
            ]
            for name, parts in data.splits_from().items()
        }
        self.splits = in_order({*self._own.splits, *self._others})
        if data.folds is not None:
            self._check_folds(data.folds)
            self.splits = in_order({*self.splits, _TEST})
        self._check_named_splits()

    def _label_names(self) -> list[str]:
        return self._own.labels

    @property
    def found_labels(self) -> bool:
        return self._own.found_labels

    def _examples(self, split: str) -> datasets.Dataset:
        folds = self.task.data.folds
        if folds is None or split not in {*folds.of, _TEST}:
            return self._whole(split)
        numbers, key = self._fold_numbers, key_of(self.task, "data.folds")
        parts = [
            self._whole(source).select(
                np.flatnonzero((numbers[source] == folds.fold) == (split == _TEST))
            )
            for source in folds.of
            if split in (_TEST, source) or (source == _TEST and split == folds.of[0])
        ]
        if not _alike([part for part in parts if part]):
            raise UserError(
                f"{', '.join(folds.of)} do not have the same columns, or some "
                "have labels and others none, so they cannot be one split. Name splits that are "
                "alike.",
                at=f"{key}.of",
            )
        joined = datasets.concatenate_datasets(parts)
        if len(joined) == 0:
            raise UserError(
                f"fold {folds.fold} of {folds.number} leaves split {split!r} "
                f"without an example. Choose fewer folds with {key}.number=N.",
                at=key,
            )
        return joined

    @cached_property
    def _fold_numbers(self) -> dict[str, np.ndarray]:
        """The fold of each example, int64 [N], of all splits that have folds: groups are whole,
        also those that stand in several."""
        folds = self.task.data.folds
        assert folds is not None
        parts = {split: Groups.of(self._whole(split)) for split in folds.of}
        numbers = fold_numbers(Groups.joined([*parts.values()]).group_keys, folds.number)
        ends = np.cumsum([len(part) for part in parts.values()])
        return dict(zip(parts, np.split(numbers, ends[:-1]), strict=True))

    def _whole(self, split: str) -> datasets.Dataset:
        if split not in self._others:
            return self._own.marked(split)
        parts = [other.examples() for other in self._others[split]]
        if not _alike(parts):
            raise UserError(
                "its parts do not have the same columns, or some have "
                "labels and others none, so they cannot be one split. Give them all labels, or "
                "none with labels: none.",
                at=key_of(self.task, f"data.splits.{split}"),
            )
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)

    def no_labels(self, split: str) -> UserError:
        if split in self._others:
            return self._others[split][0].no_labels(split)
        return self._own.no_labels(split if split in self._own.splits else self._own.splits[0])

    def locations(self, split: str, keys: Set[ContentKey]) -> dict[ContentKey, str]:
        folds = self.task.data.folds
        whole = folds.of if folds is not None and split in {*folds.of, _TEST} else [split]
        places: dict[ContentKey, str] = {}
        for name in whole:
            if name not in self._others:
                places = self._own.locations(name, keys) | places
            for other in self._others.get(name, ()):
                places = other.locations(keys) | places
        return places

    def _check_folds(self, folds: Folds) -> None:
        key = key_of(self.task, "data.folds")
        for split in folds.of:
            self._check_split(split, f"Name one of these in {key}.of")
        if _TEST in self.splits and _TEST not in folds.of:
            raise UserError(
                f"fold {folds.fold} would take the place of the data's own split "
                f"'test'. Let it have folds too, with {key}.of="
                f"[{', '.join([*folds.of, _TEST])}], or leave {key} out.",
                at=key,
            )


class _Other:
    """A split of a task that comes from other data, or a part of one."""

    def __init__(
        self,
        name: str,
        split: SplitFrom,
        combined: CombinedSource,
        source_at: Callable[[Task], Source],
    ) -> None:
        """name: the split's; of one of several parts with its number, `NAME.0`."""
        self._split, self._combined = split, combined
        task = combined.task
        self._key, kind = key_of(task, f"data.splits.{name}"), f"{key_of(task, 'type')}={task.type}"
        self._labelled = task.reads_labels and split.labels != "none" and split.randomise is None
        maps = task.has_classes and not task.asks
        if isinstance(split.labels, dict) and not maps and task.reads_labels:
            they_are = "answers" if task.asks else "numbers"
            raise UserError(
                f"maps labels to this task's, and with {kind} they are {they_are}. Take the key "
                f"out, or read no labels with {self._key}.labels=none.",
                at=f"{self._key}.labels",
            )
        if (task.of_words or task.asks) and split.randomise is not None:
            what = "questions with a context" if task.asks else "lists of words"
            raise UserError(
                f"random texts are no {what}, which {kind} needs. Take the key out.",
                at=f"{self._key}.randomise",
            )
        there = task.data.model_copy(
            update={
                "path": split.path,
                "config": split.config,
                "columns": split.columns,
                "splits": {} if split.split is None else {"train": split.split},
                **{"folds": None, "per_class": {}, "limit": {}},
            }
        )
        if self._labelled or task.asks:
            theirs = task.model_copy(update={"data": there, **({"labels": None} if maps else {})})
        else:  # reads no labels
            theirs = (Untagged if task.of_words else MaskedLM)(data=there)
        theirs.stands_at(self._key)
        self._source = source_at(theirs)
        self._source.fewest_labels = 0  # it is a part: the task's own are enough
        self._source.names_minus_one = isinstance(split.labels, dict) and "-1" in split.labels
        if "train" not in self._source.splits:
            raise UserError(
                "there is no split 'train'. It has: "
                f"{', '.join(self._source.splits)}. Choose one with {self._key}.split=NAME.",
                at=f"{self._key}.path={split.path}",
            )

    def examples(self) -> datasets.Dataset:
        return limited(self._examples(), self._split.limit)

    def _examples(self) -> datasets.Dataset:
        data, task = self._source.marked("train"), self._combined.task
        if "class" in data.column_names:
            data = data.remove_columns("class")
        if self._split.randomise is not None:
            folder = self._combined.cache_folder
            return with_marks(randomised(data, self._split.randomise, folder), folder)
        if task.asks:
            return data if self._labelled else _without_answers(data)
        if not (self._labelled and has_labels(data)):
            return data if "words" in data.column_names else _without_labels(data)
        return data if task.numbers else self._with_our_labels(data)

    def _with_our_labels(self, data: datasets.Dataset) -> datasets.Dataset:
        """Examples with our labels, sets of labels, or tags in place of theirs; without those whose
        label is left out."""
        offsets, theirs = None, self._source.labels
        if "words" in data.column_names:
            offsets, flat = flat_lists(data, "label")
            rows = np.repeat(np.arange(len(data)), np.diff(offsets))
        else:
            labels = as_numpy(data, "label")
            rows, flat = labels.nonzero() if labels.ndim == 2 else (np.arange(len(data)), labels)
        ours = self._to_ours(theirs)[flat.astype(np.int64)]
        if (unknown := np.flatnonzero(ours == _UNKNOWN)).size:
            row = data[int(rows[unknown[0]])]
            raise self._unknown_label((row["key_hi"], row["key_lo"]), theirs[flat[unknown[0]]])
        used = np.flatnonzero(ours >= 0)
        if offsets is not None:
            if len(used) < len(ours):
                raise UserError(
                    "a word cannot be left out of its example. Map it to a tag of the task, such "
                    "as O.",
                    at=f"{self._key}.labels.{theirs[flat[np.argmin(ours)]]}=null",
                )
            lists = pa.array(offsets.astype(np.int32)), pa.array(ours.astype(np.int16))
            return _replaced(data, "label", pa.ListArray.from_arrays(*lists))
        if labels.ndim == 2:
            has = np.zeros((len(data), len(self._combined.labels)), dtype=np.int64)
            has[rows[used], ours[used]] = 1
            return _with_labels(data, has)
        if not used.size:
            raise UserError(
                f"every row of {self._split.path} has a label that maps to null. Map one to a "
                "label of the task.",
                at=f"{self._key}.labels",
            )
        data = _with_labels(data, ours)
        return data if len(used) == len(data) else data.select(used)

    def locations(self, keys: Set[ContentKey]) -> dict[ContentKey, str]:
        if self._split.randomise is not None:
            return {}
        return self._source.locations("train", keys)

    def no_labels(self, split: str) -> UserError:
        """split: what the task calls it."""
        if self._labelled:
            return self._source.no_labels("train")
        return UserError(
            f"so split {split!r} has no labels, and they are needed here. Choose a split with "
            "labels.",
            at=f"{self._key}.{'labels=none' if self._split.randomise is None else 'randomise'}",
        )

    def _to_ours(self, theirs: list[str]) -> np.ndarray:
        """Our class ids of their labels: int64 [K], `_UNKNOWN` or `_LEFT_OUT` of others."""
        ours = self._combined.labels
        mapping = self._split.labels
        if not isinstance(mapping, dict):
            mapping = {label: label for label in ours}
        for label, to in mapping.items():
            if to is not None and to not in ours:
                raise UserError(
                    f"not a label of this task, which has {', '.join(ours)}. Map to one of these, "
                    "or to null to leave the rows out.",
                    at=f"{self._key}.labels.{label}={to}",
                )
        numbers = [_LEFT_OUT if to is None else ours.index(to) for to in mapping.values()]
        places = map(LabelNames([*mapping]).find, theirs)
        return np.array([_UNKNOWN if at is None else numbers[at] for at in places], np.int64)

    def _unknown_label(self, key: ContentKey, label: str) -> UserError:
        location = self._source.locations("train", {key}).get(key, self._split.path)
        why = f"not in {self._key}.labels"
        if self._split.labels is None:
            why = f"not one of this task's labels: {', '.join(self._combined.labels)}"
        return UserError(
            f"label {label!r} is {why}. Say what it is here with "
            f"{self._key}.labels={{{label}: LABEL}}, where null leaves its rows out, or read no "
            f"labels with {self._key}.labels=none.",
            at=location,
        )


def _alike(parts: Sequence[datasets.Dataset]) -> bool:
    """Whether all have the same columns, and all have labels or none has."""
    return len({(frozenset(part.column_names), has_labels(part)) for part in parts}) <= 1


def fold_numbers(group_keys: np.ndarray, number: int) -> np.ndarray:
    """The fold of each example, from 1 to `number`: int64 [N].

    group_keys: int64 [N, 2], see `Groups.group_keys`.
    """
    return (hash_keys(group_keys, FOLD) & (2**63 - 1)) % number + 1


def _without_answers(data: datasets.Dataset) -> datasets.Dataset:
    """Questions of an unlabelled split."""
    nothing = pa.nulls(len(data), QUESTIONS.field("answers").type)
    data = _replaced(data, "answers", nothing)
    data = _without_labels(data)
    return data.select_columns([*QUESTIONS.names, *of_whole_example(data)])


def _without_labels(data: datasets.Dataset) -> datasets.Dataset:
    return _with_labels(data, np.full(len(data), -1, dtype=np.int64))


def _with_labels(data: datasets.Dataset, labels: np.ndarray) -> datasets.Dataset:
    return _replaced(data, "label", label_array(labels))


def _replaced(data: datasets.Dataset, name: str, column: pa.Array) -> datasets.Dataset:
    """Other values in a column, which stays in its place: parts of a split have them alike."""
    replaced = data.remove_columns(name).add_column(name, column)
    return replaced.select_columns(data.column_names)


# ------------------------------------------------------------------------------------ random texts

VERSION = 1
"""Part of the file's name: raise it when the same texts give other random ones."""

_PASSAGE, _STARTER, _QUESTION = 106, 107, 108
"""Purposes of the hashes."""


def randomised(
    examples: datasets.Dataset, settings: Randomise, cache_folder: Path
) -> datasets.Dataset:
    """As many examples of random text, without labels; made once and then read from a file.

    examples: columns `text` and perhaps `text_b`. The words of all texts (of pairs: of `text_b`)
    are drawn by their frequency, and text number i is as long as the example's.
    """
    state = [VERSION, examples._fingerprint, settings.model_dump()]
    digest = xxhash.xxh3_128_hexdigest(json.dumps(state).encode())
    path = cache_folder / f"randomised-{digest}.arrow"
    build_once(path, lambda temporary: _write(examples, settings, temporary))
    return datasets.Dataset.from_file(str(path))


def _write(examples: datasets.Dataset, settings: Randomise, path: Path) -> None:
    pairs = "text_b" in examples.column_names
    words = Unigrams.of(examples, "text_b" if pairs else "text")

    def batches() -> Iterator[list[Any]]:
        for first in range(0, len(words.lengths), BATCH):
            numbers = np.arange(first, min(first + BATCH, len(words.lengths)))
            passages = words.passages(numbers, settings.seed)
            texts = [questions(passages, numbers, settings)] if pairs else []
            texts.append([" ".join(passage) for passage in passages])
            keys = content_keys(*texts)
            yield [*texts, np.full(len(numbers), -1), keys[:, 0], keys[:, 1]]

    write_columns(path, text_schema(pairs), batches())


@dataclass(frozen=True)
class Unigrams:
    """How often each word occurs in some texts, and how long these are. Words are what white space
    separates."""

    words: np.ndarray
    """str [V], sorted, so that draws do not depend on the order of the texts."""
    counts: np.ndarray
    """int64 [V]."""
    lengths: np.ndarray
    """Words of each text: int64 [N]."""

    @staticmethod
    def of(examples: datasets.Dataset, column: str) -> Unigrams:
        counts: Counter[str] = Counter()
        lengths = []
        for batch in examples.select_columns(column).iter(BATCH):
            for text in batch[column]:
                words = text.split()
                counts.update(words)
                lengths.append(len(words))
        words = sorted(counts)
        return Unigrams(
            np.array(words, dtype=object),
            np.array([counts[word] for word in words], dtype=np.int64),
            np.array(lengths, dtype=np.int64),
        )

    def passages(self, numbers: np.ndarray, seed: int) -> list[list[str]]:
        """Random texts number `numbers`, int64 [n]: each a function of seed and number."""
        lengths = self.lengths[numbers]
        ends = np.cumsum(lengths)
        within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        uniform = _uniform(np.repeat(numbers, lengths), seed, _PASSAGE, within)
        bounds = np.cumsum(self.counts)
        total = bounds[-1] if len(bounds) else 0
        drawn = self.words[np.searchsorted(bounds, np.floor(uniform * total), side="right")]
        return [part.tolist() for part in np.split(drawn, ends[:-1])]


def questions(passages: list[list[str]], numbers: np.ndarray, settings: Randomise) -> list[str]:
    """A question to each passage: a starter and words of the passage, drawn uniformly."""
    starters = _uniform(numbers, settings.seed, _STARTER) * len(settings.starters)
    positions = np.arange(settings.words)[None]
    draws = _uniform(numbers[:, None], settings.seed, _QUESTION, positions)
    texts = []
    for passage, starter, row in zip(passages, starters.astype(int), draws, strict=True):
        places = (row * len(passage)).astype(int).tolist() if passage else []
        texts.append(" ".join([settings.starters[starter], *(passage[at] for at in places)]))
    return texts


def _uniform(numbers: np.ndarray, seed: int, *stream: int | np.ndarray) -> np.ndarray:
    """Uniform in [0, 1): float64, of the shape to which `numbers` and the stream broadcast."""
    keys = np.stack([numbers, np.full_like(numbers, seed)], axis=-1)
    top_53_bits = (hash_keys(keys, *stream) >> 11) & (2**53 - 1)
    return top_53_bits * 2.0**-53
