"""From numbers of examples to batches, and the rows of these, which losses are of: examples, words,
tokens of words, starts and ends of answers. Those of masked-LMs are in
`ds_distill.data.masking`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import datasets
import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.data.columns import as_numpy, flat_lists
from ds_distill.data.groups import Groups, strata_of, teacher_ids
from ds_distill.data.labels import is_labelled
from ds_distill.data.tokenise import TokenTable
from ds_distill.data.windows import Windows
from ds_distill.data.words import NO_TOKEN, Words
from ds_distill.keys import hash_keys
from ds_distill.types import LACKING, Batch, Signals, with_taught
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
    teacher_ids: torch.Tensor | None = None
    """int64 [N]: the teacher that the data name for each, see `teacher_ids`."""

    @staticmethod
    def of(split: datasets.Dataset) -> Examples:
        groups = Groups.of(split)
        keys, marks = torch.from_numpy(groups.keys), torch.from_numpy(groups.marks)
        pairs = "text_b" in split.column_names
        words = Words.of(split) if "words" in split.column_names else None
        labels = as_numpy(split, "label") if words is None else flat_lists(split, "label")[1]
        windows = Windows.of(split) if "begins" in split.column_names else None
        labels = labels if labels.dtype.kind == "f" else labels.astype(np.int64)
        found = teacher_ids(split)
        ids = None if found is None else torch.from_numpy(found)
        return Examples(keys, labels, marks, pairs, words, windows, ids)

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
    def is_first(self) -> np.ndarray:
        """Whether each example is the first window of its text or question, or the whole of it:
        bool [N]."""
        windows = self.words if self.windows is None else self.windows
        first = np.full(len(self), windows is None)
        if windows is not None:
            first[windows.firsts] = True
        return first

    @property
    def counts(self) -> dict[str, int]:
        """For records: how many `examples` there are, each once, and how many `windows` they are
        read in, where those are more."""
        examples = int(self.is_first.sum())
        windows = {"windows": len(self)} if len(self) > examples else {}
        return {"examples": examples, **windows}

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
        ids = None if self.teacher_ids is None else self.teacher_ids[chosen]
        return Examples(self.keys[chosen], labels, marks, self.pairs, words, windows, ids)

    def where(self, chosen: np.ndarray) -> tuple[Examples, np.ndarray]:
        """Chosen examples, bool [N], and the numbers of their rows: int64 [n]."""
        indices = np.flatnonzero(chosen)
        return self.at(indices), self.rows_of(indices)


@dataclass(frozen=True)
class Rows:
    """What n rows of B examples are."""

    examples: torch.Tensor
    """int64 [n]: the number of each row's example, from 0 to B - 1."""
    labels: torch.Tensor
    """[n], or [n, L]; see `Examples`. Below 0 where there is none."""
    sets: dict[str, torch.Tensor]
    """Numbers of those that count, by name: int64."""
    views: dict[TokenTable, PaddedView]
    """Where they stand."""
    noun: str
    """What they are."""
    cached: Callable[[Signals], Signals] = lambda signals: signals
    """Makes cached signals those of the batch."""

    def dummy(self) -> Rows:
        """One row in place of none."""
        views = {
            table: replace(view, positions=torch.zeros(1, dtype=torch.int64))
            for table, view in self.views.items()
        }
        first = torch.zeros(1, dtype=torch.int64)
        return replace(self, examples=first, labels=torch.full((1,), -100), views=views)


RowsOf = Callable[[Examples, np.ndarray, Mapping[TokenTable, PaddedView], int], Rows]
"""(B examples, their numbers int64 [B] in the split, their views, epoch) -> their rows."""


class Collator:
    """Makes a task's batches from numbers of a split's N examples."""

    def __init__(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        rows: RowsOf,
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
    ) -> None:
        """
        examples: the split's N examples.
        tables: a token table over the same N examples for each model that runs; models
            with the same tokenizer share one.
        rows: what a loss is of, see `ds_distill.data.batches`.
        cached: reads the cached signals of a batch; None for live teachers.
        packed: the models that get packed views.
        """
        self._examples, self._tables, self._rows = examples, dict(tables), rows
        self._cached, self._packed = cached, frozenset(packed)
        # Only the student's: live teachers must not change which examples share a batch.
        plan_by = [tables["student"]] if "student" in tables else list(tables.values())
        self.lengths: np.ndarray = np.max([table.lengths for table in plan_by], axis=0)
        """int32 [N]: tokens of each example, for planning batches: in the student's view, or
        without a student in the longest."""

    def packs_all(self, models: Iterable[str]) -> bool:
        """Whether each of some models gets packed views, which several batches join unpadded."""
        return self._packed.issuperset(models)

    def __call__(
        self, indices: np.ndarray, epoch: int = 0, progress: float = 0.0, *, signals: bool = True
    ) -> Batch:
        """The batch of examples `indices` (int [B]). Where no row is left, a batch of one dummy
        row that no loss counts, because every rank must run every model in each step. Of no
        examples it has one of a single token: a text might say NaN, and 0 times that is NaN.

        progress: see `Batch`. signals: read the teachers' signals, where they are cached.
        """
        chosen = indices if len(indices) else np.zeros(1, dtype=np.int64)
        examples = self._examples.at(chosen)
        rows = self._rows(
            examples, chosen, {table: table.view(chosen) for table in self._tables.values()}, epoch
        )
        cached = self._cached(chosen, epoch) if self._cached and signals else {}
        check_cached_rows(cached, len(rows.labels), rows.noun)
        cached = {name: rows.cached(of_model) for name, of_model in cached.items()}
        sets = rows.sets
        if not len(indices):
            sets = {name: of[:0] for name, of in sets.items()}
            first = {table: view.first_token() for table, view in rows.views.items()}
            rows = replace(rows, views=first)
        if len(rows.labels) == 0:
            rows = rows.dummy()
            cached = {name: of_model.dummy() for name, of_model in cached.items()}
        labels, ids = rows.labels, examples.teacher_ids
        return Batch(
            keys=examples.keys[rows.examples],
            views=views_by_model(self._tables, rows.views, self._packed),
            labels=labels if labels.is_floating_point() else labels.masked_fill(labels < 0, -100),
            row_sets=with_taught(sets, cached),
            epoch=epoch,
            progress=progress,
            signals=cached,
            teacher_ids=None if ids is None else ids[rows.examples],
        )


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
    tables: Mapping[str, TokenTable],
    views: Mapping[TokenTable, PaddedView],
    packed: Collection[str],
) -> dict[str, View]:
    """Each model's view, padded or packed; models that share a token table share the view."""
    of_packed = {tables[name] for name in tables if name in packed}
    packed_views = {table: PackedView.of(views[table]) for table in of_packed}
    return {
        name: packed_views[table] if name in packed else views[table]
        for name, table in tables.items()
    }


# -------------------------------------------------------------------------------------------- rows


Views = Mapping[TokenTable, PaddedView]


def text_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row per example. See `RowsOf`."""
    known = torch.from_numpy(is_labelled(examples.labels)).nonzero()[:, 0]
    return Rows(
        examples=torch.arange(len(indices)),
        labels=torch.from_numpy(examples.labels),
        sets={"all": torch.arange(len(indices)), "labelled": known},
        views=dict(views),
        noun="examples",
    )


def word_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row per word of lists of words, in every view at the word's first token.

    The words that count are the same whichever models run: see `Words.counted`. A word without a
    token in a view is read at its first position and is a row that no loss counts, so that the rows
    of a cache are the words and nothing else.
    """
    assert examples.words is not None, "examples of words"
    of_row, counted = torch.from_numpy(examples.words.examples), examples.words.counted
    placed = {}
    for table, view in views.items():
        first = table.first_tokens(indices)
        assert not (counted & (first == NO_TOKEN)).any(), "words that count have a token"
        positions = of_row * view.input_ids.shape[1] + torch.from_numpy(first).clamp(min=0)
        placed[table] = replace(view, positions=positions)
    labels, counts = torch.from_numpy(examples.labels), torch.from_numpy(counted)
    return Rows(
        examples=of_row,
        labels=labels,
        sets={
            WORDS: torch.arange(len(labels)),
            "all": counts.nonzero()[:, 0],
            "labelled": (counts & (labels >= 0)).nonzero()[:, 0],
        },
        views=placed,
        noun="words",
    )


def word_token_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row per token of a word, for a training on tags alone. Of one model."""
    assert examples.words is not None, "examples of words"
    [(table, view)] = views.items()
    word, position = table.word_tokens(indices)
    of_row = torch.from_numpy(examples.words.examples[word])
    counts = torch.from_numpy(examples.words.counted[word])
    labels = torch.from_numpy(examples.labels[word])
    positions = of_row * view.input_ids.shape[1] + torch.from_numpy(position)
    return Rows(
        examples=of_row,
        labels=labels,
        sets={
            "all": counts.nonzero()[:, 0],
            "labelled": (counts & (labels >= 0)).nonzero()[:, 0],
        },
        views={table: replace(view, positions=positions)},
        noun="tokens",
    )


def span_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """Of each window of a question's context two rows, where the answer starts and where it ends.

    The classes of a row are the window's first token, which stands for no answer, and the tokens of
    its context; a batch has as many as its longest context. All views have the same tokens.
    """
    assert examples.windows is not None, "examples of windows"
    candidates = torch.from_numpy(examples.windows.candidates)
    labels = torch.from_numpy(examples.labels).flatten()
    return Rows(
        examples=torch.arange(len(indices)).repeat_interleave(2),
        labels=labels,
        sets={"all": torch.arange(len(labels)), "labelled": (labels >= 0).nonzero()[:, 0]},
        views={table: replace(view, candidates=candidates) for table, view in views.items()},
        noun="starts and ends",
        cached=lambda signals: cut_to(candidates, signals),
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
