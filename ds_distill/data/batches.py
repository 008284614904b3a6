"""Collators: from example indices to batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import datasets
import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.data.groups import Groups, strata_of
from ds_distill.data.labels import is_labelled
from ds_distill.data.question_windows import Windows
from ds_distill.data.text_windows import TextWindows
from ds_distill.data.tokenise import TokenTable
from ds_distill.data.word_windows import ContextWords
from ds_distill.data.words import NO_TOKEN, Words, flat_lists
from ds_distill.keys import hash_keys
from ds_distill.types import LACKING, Batch, Signals
from ds_distill.views import PackedView, PaddedView, View

WORDS = "words"
"""The row set of all words, also of those that do not count."""

CachedSignals = Callable[[np.ndarray, int], dict[str, Signals]]
"""(example indices int64 [B], epoch) -> cached signals, by teacher."""


@dataclass(frozen=True)
class Examples:
    """Keys and labels of a split's N examples, without their text. R rows: words where examples are
    lists of them, else examples."""

    keys: torch.Tensor
    """int64 [N, 2]."""
    labels: np.ndarray
    """int64 [R]: class ids; or [N, L]: of each label whether an example has it; or [N, 2]: where
    the answer in a window starts and ends. -1 where there is none. Or float32 [N]: numbers, NaN
    where an example has none."""
    marks: torch.Tensor | None = None
    """int64 [N, M], see `Groups`. None: copies of a text alone are of one group."""
    pairs: bool = False
    """Whether each example is a pair of texts."""
    words: Words | None = None
    """Where each example is a list of words."""
    windows: Windows | None = None
    """Where each example is a window of a question's context."""

    @staticmethod
    def of(split: datasets.Dataset) -> Examples:
        columns = split.with_format("numpy")  # not `.data`, which also has what a cap left out
        groups = Groups.of(split)
        keys, marks = torch.from_numpy(groups.keys), torch.from_numpy(groups.marks)
        pairs = "text_b" in split.column_names
        kinds: dict[str, type[Words]] = {"question": ContextWords, "owned": TextWindows}
        kind = next((kinds[name] for name in kinds if name in split.column_names), Words)
        words = kind.of(split) if "words" in split.column_names else None
        labels = columns["label"][:] if words is None else flat_lists(split, "label")[1]
        windows = Windows.of(split) if "begins" in split.column_names else None
        labels = labels if labels.dtype.kind == "f" else labels.astype(np.int64)
        return Examples(keys, labels, marks, pairs, words, windows)

    @cached_property
    def groups(self) -> Groups:
        """What the examples have in common: those of one file, or copies of one text, are too
        similar to fit on some and evaluate on others."""
        keys = self.keys.numpy()
        marks = hash_keys(keys)[:, None] if self.marks is None else self.marks.numpy()
        return Groups(keys, marks)

    @property
    def group_keys(self) -> torch.Tensor:
        """What assigns examples to parts and folds: int64 [N, 2]; see `Groups.group_keys`."""
        return torch.from_numpy(self.groups.group_keys)

    @property
    def strata(self) -> np.ndarray:
        """What each example is: int64 [N]; see `strata_of`."""
        offsets = None if self.words is None else self.words.offsets
        return strata_of(self.counted_labels, offsets)

    @property
    def labelled(self) -> np.ndarray:
        """Whether each example has labels: bool [N]."""
        labels = self.labels if self.words is None else self.labels[self.words.offsets[:-1]]
        return is_labelled(labels)

    @property
    def counted_labels(self) -> np.ndarray:
        """`labels`, -1 also of words that do not count."""
        return self.labels if self.words is None else np.where(self.words.counted, self.labels, -1)

    @property
    def of_rows(self) -> torch.Tensor:
        """The number of each row's example: int64 [R]."""
        numbers = np.arange(len(self)) if self.words is None else self.words.examples
        return torch.from_numpy(numbers)

    def rows_of(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the rows of some examples, int [B], in their order: int64 [n]."""
        return indices if self.words is None else self.words.of_examples(indices)

    def class_counts(self, classes: int) -> np.ndarray:
        """How many rows that count have each label: int64 [C]."""
        known = self.counted_labels[is_labelled(self.counted_labels)]
        return known.sum(axis=0) if known.ndim > 1 else np.bincount(known, minlength=classes)

    def __len__(self) -> int:
        """N."""
        return len(self.keys)

    def at(self, indices: np.ndarray) -> Examples:
        """Some of the examples."""
        chosen = torch.from_numpy(indices)
        marks = None if self.marks is None else self.marks[chosen]
        words = None if self.words is None else self.words.at(indices)
        windows = None if self.windows is None else self.windows.at(indices)
        labels = self.labels[self.rows_of(indices)]
        return Examples(self.keys[chosen], labels, marks, self.pairs, words, windows)


class Collator(Protocol):
    """Makes a task's batches from indices of a split's N examples."""

    lengths: np.ndarray
    """int32 [N]: tokens of each example, for planning batches."""

    def __call__(self, indices: np.ndarray, epoch: int = 0, *, signals: bool = True) -> Batch:
        """The batch of examples `indices` (int [B]). Without examples, a batch of one dummy
        row that no loss counts, because every rank must run every model in each step.

        signals: read the teachers' signals, where they are cached.
        """
        ...


class SequenceCollator:
    """Batches of a sequence-level task: one row per example."""

    def __init__(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
    ) -> None:
        """
        examples: the split's N examples.
        tables: a token table over the same N examples for each model that runs; models
            with the same tokenizer share one.
        cached: reads the cached signals of a batch; None for live teachers.
        packed: the models that get packed views.
        """
        self._examples = examples
        self._tables = dict(tables)
        self._cached, self._packed = cached, frozenset(packed)
        # Only the student's: live teachers must not change which examples share a batch.
        plan_by = [tables["student"]] if "student" in tables else list(tables.values())
        # Lengths in the student's view, or without a student in the longest view.
        self.lengths: np.ndarray = np.max([table.lengths for table in plan_by], axis=0)

    def __call__(self, indices: np.ndarray, epoch: int = 0, *, signals: bool = True) -> Batch:
        """See `Collator`."""
        dummy = len(indices) == 0
        chosen = np.zeros(1, dtype=np.int64) if dummy else indices
        views: dict[int, PaddedView] = {}
        for table in self._tables.values():
            if id(table) not in views:
                views[id(table)] = table.view(chosen)
        examples = self._examples.at(chosen)
        labels = torch.from_numpy(examples.labels)
        known = torch.from_numpy(is_labelled(examples.labels)).nonzero()[:, 0]
        return Batch(
            keys=examples.keys,
            views=views_by_model(self._tables, views, self._packed),
            labels=labels if labels.is_floating_point() else labels.masked_fill(labels < 0, -100),
            row_sets={
                "all": torch.arange(0 if dummy else len(chosen)),
                "labelled": known[:0] if dummy else known,
            },
            epoch=epoch,
            signals=self._cached(chosen, epoch) if self._cached and signals else {},
        )


class WordCollator:
    """Batches of lists of words: a row per word, in every view at the word's first token."""

    def __init__(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
    ) -> None:
        """See `SequenceCollator`. The words that count are the same whichever models run: see
        `Words.counted`. A word without a token in a view is read at its first position and is a
        row that no loss counts, so that the rows of a cache are the words and nothing else."""
        self._whole = SequenceCollator(examples, tables, None, packed)
        self._examples, self._tables = examples, dict(tables)
        self._cached, self._packed = cached, frozenset(packed)
        self.lengths = self._whole.lengths

    def __call__(self, indices: np.ndarray, epoch: int = 0, *, signals: bool = True) -> Batch:
        """See `Collator`."""
        dummy = len(indices) == 0
        chosen = np.zeros(1, dtype=np.int64) if dummy else indices
        examples = self._examples.at(chosen)
        assert examples.words is not None, "examples of words"
        of_row = torch.from_numpy(examples.words.examples)
        views: dict[int, PaddedView] = {}
        for table in self._tables.values():
            if id(table) not in views:
                view = table.view(chosen)
                first = torch.from_numpy(table.first_tokens(chosen))
                positions = of_row * view.input_ids.shape[1] + first.clamp(min=0)
                views[id(table)] = replace(view, positions=positions)
                missing = examples.words.counted & (first.numpy() == NO_TOKEN)
                assert not missing.any(), "words that count have a token in every view"
        counts = torch.from_numpy(examples.words.counted & (not dummy))
        labels = torch.from_numpy(examples.labels)
        cached = self._cached(chosen, epoch) if self._cached and signals else {}
        check_cached_rows(cached, len(labels), "words")
        return Batch(
            keys=examples.keys[of_row],
            views=views_by_model(self._tables, views, self._packed),
            labels=torch.where(labels < 0, -100, labels),
            row_sets={
                WORDS: torch.arange(0 if dummy else len(labels)),
                "all": counts.nonzero()[:, 0],
                "labelled": (counts & (labels >= 0)).nonzero()[:, 0],
            },
            epoch=epoch,
            signals=cached,
        )


class WordTokenCollator:
    """Batches of lists of words for a training on their tags alone: a row per token of a word."""

    def __init__(self, examples: Examples, tables: Mapping[str, TokenTable]) -> None:
        """See `SequenceCollator`. The table of one model."""
        self._examples = examples
        [(self._model, self._table)] = tables.items()
        self.lengths = self._table.lengths

    def __call__(self, indices: np.ndarray, epoch: int = 0, *, signals: bool = True) -> Batch:
        """See `Collator`."""
        dummy = len(indices) == 0
        chosen = np.zeros(1, dtype=np.int64) if dummy else indices
        examples, view = self._examples.at(chosen), self._table.view(chosen)
        assert examples.words is not None, "examples of words"
        word, position = self._table.word_tokens(chosen)
        if len(word) == 0:  # a head needs a row to run on
            word, position, dummy = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), True
        of_row = torch.from_numpy(examples.words.examples[word])
        positions = of_row * view.input_ids.shape[1] + torch.from_numpy(position)
        counts = torch.from_numpy(examples.words.counted[word] & (not dummy))
        labels = torch.from_numpy(examples.labels[word])
        return Batch(
            keys=examples.keys[of_row],
            views={self._model: replace(view, positions=positions)},
            labels=torch.where(labels < 0, -100, labels),
            row_sets={
                "all": counts.nonzero()[:, 0],
                "labelled": (counts & (labels >= 0)).nonzero()[:, 0],
            },
            epoch=epoch,
        )


class SpanCollator:
    """Batches of questions with windows of their contexts: of each two rows, where the answer
    starts and where it ends. The classes of a row are the window's first token, which stands for no
    answer, and the tokens of its context; a batch has as many as its longest context."""

    def __init__(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
    ) -> None:
        """See `SequenceCollator`. All tables are of the same tokens."""
        self._examples, self._tables = examples, dict(tables)
        self._cached, self._packed = cached, frozenset(packed)
        self.lengths = SequenceCollator(examples, tables).lengths

    def __call__(self, indices: np.ndarray, epoch: int = 0, *, signals: bool = True) -> Batch:
        """See `Collator`."""
        dummy = len(indices) == 0
        chosen = np.zeros(1, dtype=np.int64) if dummy else indices
        examples = self._examples.at(chosen)
        assert examples.windows is not None, "examples of windows"
        candidates = torch.from_numpy(examples.windows.candidates)
        views: dict[int, PaddedView] = {}
        for table in self._tables.values():
            if id(table) not in views:
                views[id(table)] = replace(table.view(chosen), candidates=candidates)
        labels = torch.from_numpy(examples.labels).flatten()
        cached = self._cached(chosen, epoch) if self._cached and signals else {}
        check_cached_rows(cached, len(labels), "starts and ends")
        every = torch.arange(0 if dummy else len(labels))
        return Batch(
            keys=examples.keys.repeat_interleave(2, dim=0),
            views=views_by_model(self._tables, views, self._packed),
            labels=torch.where(labels < 0, -100, labels),
            row_sets={"all": every, "labelled": every[labels[every] >= 0]},
            epoch=epoch,
            signals={name: cut_to(candidates, outputs) for name, outputs in cached.items()},
        )


def cut_to(candidates: torch.Tensor, signals: Signals) -> Signals:
    """Cached signals with the classes that a batch has. Raises ValueError where they have others;
    see `check_cached_rows`.

    candidates: int64 [B, K], see `Windows.candidates`.
    """
    logits = signals.logits
    known = (candidates >= 0).repeat_interleave(2, dim=0)
    if not torch.equal(logits != LACKING, F.pad(known, (0, logits.shape[1] - known.shape[1]))):
        raise ValueError("the cache has logits of other tokens than the batch's")
    return replace(signals, output=logits[:, : known.shape[1]])


def stored_rows(batch: Batch) -> torch.Tensor:
    """The rows of a batch that a cache stores: of words all, so that they do not depend on the
    other models; else those that count. int64 [k]."""
    return batch.row_sets.get(WORDS, batch.row_sets["all"])


def check_cached_rows(signals: Mapping[str, Signals], rows: int, noun: str) -> None:
    """Raises ValueError for cached signals of another length than the batch's rows. Fingerprints
    should prevent that; rows of other tokens would go unnoticed.

    noun: what the rows are.
    """
    for name, outputs in signals.items():
        if len(outputs) != rows:
            raise ValueError(
                f"the cache has {len(outputs)} rows of teacher {name!r} for a batch of {rows} "
                f"{noun}"
            )


def views_by_model(
    tables: Mapping[str, TokenTable], views: Mapping[int, PaddedView], packed: Collection[str]
) -> dict[str, View]:
    """Each model's view, padded or packed; models that share a token table share the view.

    views: by `id` of the table.
    """
    packed_views: dict[int, PackedView] = {}
    by_model: dict[str, View] = {}
    for name, table in tables.items():
        if name not in packed:
            by_model[name] = views[id(table)]
            continue
        if id(table) not in packed_views:
            packed_views[id(table)] = PackedView.of(views[id(table)])
        by_model[name] = packed_views[id(table)]
    return by_model
