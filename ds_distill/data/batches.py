"""From numbers of units to batches. A unit is an example, or a window of one, and has rows, which
losses are of: one, one for each word, or start and end of an answer. Those of masked-LMs are in
`ds_distill.data.masking`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import datasets
import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.data.columns import as_numpy, flat_lists, labels_of
from ds_distill.data.groups import Groups, strata_of, teacher_ids
from ds_distill.data.labels import is_labelled
from ds_distill.data.tokenise import TokenTable
from ds_distill.keys import hash_keys
from ds_distill.types import LACKING, Batch, Signals, with_taught
from ds_distill.views import PackedView, PaddedView, View

WORDS = "words"
"""The row set of all words, also of those that do not count."""

CachedSignals = Callable[[np.ndarray, int], dict[str, Signals]]
"""(numbers of units int64 [B], epoch) -> cached signals, by teacher."""


@dataclass(frozen=True)
class Units:
    """A split's N units without their text, and their R rows, one unit's after the other's. A row
    of a long example is in several windows, and belongs to one of them."""

    keys: torch.Tensor
    """int64 [N, 2]."""
    labels: np.ndarray
    """int64 [R]: class ids; of an answer the classes of its first and last token; or [R, L]: of
    each label whether an example has it. -1 where there is none. Or float32 [R]: numbers, NaN
    where there is none."""
    marks: np.ndarray
    """int64 [N, M], see `Groups`."""
    offsets: np.ndarray
    """int64 [N + 1]: the first row of each unit, and R."""
    owned: np.ndarray
    """bool [R]: whether a row belongs to its unit."""
    counted: np.ndarray
    """bool [R]: those of them that losses count: of words that have a token in the view of every
    model of the recipe. The others count as O in every score."""
    number: np.ndarray
    """int64 [N]: the number of each one's example."""
    pairs: bool = False
    """Whether each is a pair of texts."""
    teacher_ids: torch.Tensor | None = None
    """int64 [N]: the teacher that the data name for each, see `teacher_ids`."""
    table: datasets.Dataset | None = None
    """The file of all units; the N of them stand there at `places`, int64 [N]."""
    places: np.ndarray | None = None

    @staticmethod
    def of(split: datasets.Dataset) -> Units:
        """Of a split as a source reads it, or as `ds_distill.data.windows` makes it."""
        labels, offsets = labels_of(split)
        groups, ids = Groups.of(split), teacher_ids(split)
        units = replace(
            Units.plain(torch.from_numpy(groups.keys), labels, groups.marks, offsets),
            pairs="text_b" in split.column_names,
            teacher_ids=None if ids is None else torch.from_numpy(ids),
            table=split,
        )
        if "owned" not in split.column_names:
            return units
        owned = flat_lists(split, "owned")[1]
        counted = owned & flat_lists(split, "counted")[1]
        return replace(units, owned=owned, counted=counted, number=as_numpy(split, "number"))

    @staticmethod
    def plain(
        keys: torch.Tensor,
        labels: np.ndarray,
        marks: np.ndarray | None = None,
        offsets: np.ndarray | None = None,
    ) -> Units:
        """Units that are examples whole, of which all rows count.

        marks: None: copies of a text alone are of one group. offsets: None: each has one row.
        """
        marks = hash_keys(keys.numpy())[:, None] if marks is None else marks
        offsets = np.arange(len(labels) + 1) if offsets is None else offsets
        every, numbers = np.ones(len(labels), dtype=bool), np.arange(len(keys))
        return Units(keys, labels, marks, offsets, every, every, numbers, places=numbers)

    @cached_property
    def groups(self) -> Groups:
        """What the units have in common: those of one file, or copies of one text, are too similar
        to fit on some and evaluate on others."""
        return Groups(self.keys.numpy(), self.marks)

    @property
    def group_keys(self) -> torch.Tensor:
        """What assigns units to parts and folds: int64 [N, 2]; see `Groups.group_keys`."""
        return torch.from_numpy(self.groups.group_keys)

    @property
    def strata(self) -> np.ndarray:
        """What each unit is: int64 [N]; see `strata_of`."""
        return strata_of(self.counted_labels, self.offsets)

    @property
    def is_first(self) -> np.ndarray:
        """Whether each is the first window of its example, or the whole of it: bool [N]."""
        first = np.zeros(len(self), dtype=bool)
        first[np.unique(self.number, return_index=True)[1]] = True
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
        """Whether each has labels: bool [N]."""
        return is_labelled(self.labels[self.offsets[:-1]])

    @property
    def counted_labels(self) -> np.ndarray:
        """`labels`, none also of rows that do not count."""
        return self.labels if self.counted.all() else np.where(self.counted, self.labels, -1)

    @property
    def of_rows(self) -> torch.Tensor:
        """The number of each row's unit: int64 [R]."""
        return torch.from_numpy(np.repeat(np.arange(len(self)), np.diff(self.offsets)))

    def rows_of(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the rows of some units, int [B], in their order: int64 [n]."""
        return _of_lists(self.offsets, indices)[1]

    def class_counts(self, classes: int) -> np.ndarray:
        """How many rows that count have each label: int64 [C]."""
        known = self.counted_labels[is_labelled(self.counted_labels)]
        return known.sum(axis=0) if known.ndim > 1 else np.bincount(known, minlength=classes)

    def __len__(self) -> int:
        """N."""
        return len(self.keys)

    def at(self, indices: np.ndarray) -> Units:
        """Some of the units, int [B]."""
        chosen, ids = torch.from_numpy(indices), self.teacher_ids
        offsets, rows = _of_lists(self.offsets, indices)
        return replace(
            self,
            keys=self.keys[chosen],
            labels=self.labels[rows],
            marks=self.marks[indices],
            offsets=offsets,
            owned=self.owned[rows],
            counted=self.counted[rows],
            number=self.number[indices],
            teacher_ids=None if ids is None else ids[chosen],
            places=None if self.places is None else self.places[indices],
        )

    def where(self, chosen: np.ndarray) -> tuple[Units, np.ndarray]:
        """Chosen units, bool [N], and the numbers of their rows: int64 [n]."""
        indices = np.flatnonzero(chosen)
        return self.at(indices), self.rows_of(indices)

    def of_whole_examples(self, chosen: np.ndarray) -> np.ndarray:
        """Of chosen units, bool [N], those of whose example all are: bool [N]."""
        return chosen & ~np.isin(self.number, self.number[~chosen])

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the T examples, each once, in their order: int64 [W]; and where those of each
        begin, int64 [T + 1]. The windows of an example are all there, in their order."""
        rows = np.flatnonzero(self.owned)
        _, example = np.unique(self.number, return_inverse=True)
        owner, examples = self.of_rows.numpy()[rows], int(self.is_first.sum())
        lengths = np.bincount(example[owner], minlength=examples)
        return rows, np.concatenate([[0], np.cumsum(lengths)])

    @property
    def has_answers(self) -> bool:
        """Whether they are words of contexts, in which there are any number of answers."""
        return self.table is not None and "answer_starts" in self.table.column_names

    def stored(self) -> datasets.Dataset:
        """The units as they are in their file, with what only a score reads."""
        assert self.table is not None, "units of a split"
        return self.table.select(self.places)


def _of_lists(offsets: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some lists, int [B], of those that begin at `offsets`, int64 [N + 1]: where each then begins,
    int64 [B + 1], and the numbers of their values, int64 [n]. It looks at these lists alone:
    differences over all N would be most of a micro-batch's time."""
    lengths = offsets[indices + 1] - offsets[indices]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return ends, np.repeat(offsets[indices] - ends[:-1], lengths) + np.arange(ends[-1])


@dataclass(frozen=True)
class Rows:
    """What n rows of B units are."""

    units: torch.Tensor
    """int64 [n]: the number of each row's unit, from 0 to B - 1."""
    labels: torch.Tensor
    """[n], or [n, L]; see `Units`. Below 0 where there is none."""
    sets: dict[str, torch.Tensor]
    """Numbers of those that count, by name: int64."""
    views: Views
    """Where they stand."""

    def dummy(self) -> Rows:
        """One row in place of none."""
        first = torch.zeros(1, dtype=torch.int64)
        views = {table: replace(view, positions=first) for table, view in self.views.items()}
        return replace(self, units=first, labels=torch.full((1,), -100), views=views)


Views = Mapping[TokenTable, PaddedView]
RowsOf = Callable[[Units, np.ndarray, Views, int], Rows]
"""(B units, their numbers int64 [B] in the split, their views, epoch) -> their rows."""


class Collator:
    """Makes a task's batches from numbers of a split's N units."""

    def __init__(
        self,
        units: Units,
        tables: Mapping[str, TokenTable],
        rows: RowsOf,
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
    ) -> None:
        """
        units: the split's N units.
        tables: a token table over the same N units for each model that runs; models
            with the same tokenizer share one.
        rows: what a loss is of, see `ds_distill.data.batches`.
        cached: reads the cached signals of a batch; None for live teachers.
        packed: the models that get packed views.
        """
        self._units, self._tables, self._rows = units, dict(tables), rows
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
        units = self._units.at(chosen)
        rows = self._rows(
            units, chosen, {table: table.view(chosen) for table in self._tables.values()}, epoch
        )
        cached = self._cached(chosen, epoch) if self._cached and signals else {}
        check_cached_rows(cached, len(rows.labels))
        candidates = next(iter(rows.views.values())).candidates
        if candidates is not None:
            cached = {name: cut_to(candidates, of_model) for name, of_model in cached.items()}
        sets = rows.sets
        if not len(indices):
            sets = {name: of[:0] for name, of in sets.items()}
            first = {table: view.first_token() for table, view in rows.views.items()}
            rows = replace(rows, views=first)
        if len(rows.labels) == 0:
            rows = rows.dummy()
            cached = {name: of_model.dummy() for name, of_model in cached.items()}
        labels, ids = rows.labels, units.teacher_ids
        return Batch(
            keys=units.keys[rows.units],
            views=views_by_model(self._tables, rows.views, self._packed),
            labels=labels if labels.is_floating_point() else labels.masked_fill(labels < 0, -100),
            row_sets=with_taught(sets, cached),
            epoch=epoch,
            progress=progress,
            signals=cached,
            teacher_ids=None if ids is None else ids[rows.units],
        )


def stored_rows(batch: Batch) -> torch.Tensor:
    """The rows of a batch that a cache stores: of words all, so that they do not depend on the
    other models; else those that count. int64 [k]."""
    return batch.row_sets.get(WORDS, batch.row_sets["all"])


def check_cached_rows(signals: Mapping[str, Signals], rows: int) -> None:
    """Raises ValueError for cached signals of another length than the batch's rows. Fingerprints
    should prevent that; rows of other tokens would go unnoticed."""
    for name, outputs in signals.items():
        if len(outputs) != rows:
            raise ValueError(
                f"the cache has {len(outputs)} rows of teacher {name!r} for a batch of {rows}"
            )


def views_by_model(
    tables: Mapping[str, TokenTable],
    views: Views,
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


def label_rows(units: Units, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row for each label, at its place in every view; see `RowsOf`. Words stand at their first
    tokens. One without a token in a view is read at its first position, and counts in no loss,
    whichever models run, so that the rows of a cache are the words and nothing else."""
    labels, counted = torch.from_numpy(units.labels), torch.from_numpy(units.counted)
    sets = _counted_sets(counted, labels)
    if any(view.positions is not None for view in views.values()):
        sets = {WORDS: torch.arange(len(labels)), **sets}
    return Rows(units.of_rows, labels, sets, views)


def word_token_rows(units: Units, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row per token of a word, for a training on tags alone. Of one model."""
    [(table, view)] = views.items()
    counts = table.token_counts(indices)
    word = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    before = torch.from_numpy(np.cumsum(counts) - counts)
    labels, counted = torch.from_numpy(units.labels)[word], torch.from_numpy(units.counted)[word]
    assert view.positions is not None, "units of words"
    positions = view.positions[word] + torch.arange(len(word)) - before[word]
    views = {table: replace(view, positions=positions)}
    return Rows(units.of_rows[word], labels, _counted_sets(counted, labels), views)


def _counted_sets(counted: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    known = torch.from_numpy(is_labelled(labels.numpy()))
    return {"all": counted.nonzero()[:, 0], "labelled": (counted & known).nonzero()[:, 0]}


def cut_to(candidates: torch.Tensor, signals: Signals) -> Signals:
    """Cached signals with the classes that a batch has. Raises ValueError where they have others;
    see `check_cached_rows`.

    candidates: int64 [B, K], see `PaddedView`.
    """
    logits = signals.logits
    known = (candidates >= 0).repeat_interleave(2, dim=0)
    if not torch.equal(logits != LACKING, F.pad(known, (0, logits.shape[1] - known.shape[1]))):
        raise ValueError("the cache has logits of other tokens than the batch's")
    return replace(signals, output=logits[:, : known.shape[1]])
