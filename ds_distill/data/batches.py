"""Collators: from example indices to batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import datasets
import numpy as np
import torch

from ds_distill.data.labels import is_labelled
from ds_distill.data.tokenise import TokenTable
from ds_distill.data.validation_split import labels_and_groups
from ds_distill.types import Batch, Signals
from ds_distill.views import PackedView, PaddedView, View

CachedSignals = Callable[[np.ndarray, int], dict[str, Signals]]
"""(example indices int64 [B], epoch) -> cached signals, by teacher."""


@dataclass(frozen=True)
class Examples:
    """Keys and labels of a split's examples, without their text."""

    keys: torch.Tensor
    """int64 [N, 2]."""
    labels: np.ndarray
    """int64 [N]: class ids; or [N, L]: of each label whether an example has it. -1 where an example
    has none."""
    groups: torch.Tensor | None = None
    """int64 [N, 2], where parts and folds are assigned by a group, e.g. the source file, and
    not by the example's own key."""
    pairs: bool = False
    """Whether each example is a pair of texts."""

    @staticmethod
    def of(split: datasets.Dataset) -> Examples:
        columns = split.with_format("numpy")  # not `.data`, which also has what a cap left out
        keys = np.stack([columns[name][:] for name in ("key_hi", "key_lo")], axis=1)
        labels, groups = labels_and_groups(split)
        grouped = torch.from_numpy(groups) if "group" in split.column_names else None
        pairs = "text_b" in split.column_names
        return Examples(torch.from_numpy(keys), labels, grouped, pairs)

    @property
    def group_keys(self) -> torch.Tensor:
        """What assigns examples to parts and folds: int64 [N, 2]. The group where there is one,
        because examples of one file are too similar to fit on some and evaluate on others;
        else the key."""
        return self.keys if self.groups is None else self.groups

    @property
    def labelled(self) -> np.ndarray:
        """Whether each example has labels: bool [N]."""
        return is_labelled(self.labels)

    def class_counts(self, classes: int) -> np.ndarray:
        """How many examples have each label: int64 [C]."""
        known = self.labels[self.labelled]
        return known.sum(axis=0) if known.ndim > 1 else np.bincount(known, minlength=classes)

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, indices: np.ndarray) -> Examples:
        chosen = torch.from_numpy(indices)
        groups = None if self.groups is None else self.groups[chosen]
        return Examples(self.keys[chosen], self.labels[indices], groups, self.pairs)


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
            labels=torch.where(labels < 0, -100, labels),
            row_sets={
                "all": torch.arange(0 if dummy else len(chosen)),
                "labelled": known[:0] if dummy else known,
            },
            epoch=epoch,
            signals=self._cached(chosen, epoch) if self._cached and signals else {},
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
