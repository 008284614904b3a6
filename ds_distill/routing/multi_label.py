"""Routing where an example has any number of labels: what a teacher knows is known of each label,
which is a problem of two classes, without it and with it.

T teachers, N examples or n rows, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ds_distill.data.labels import is_labelled
from ds_distill.errors import UserError
from ds_distill.files import new_file
from ds_distill.process.activity import mark
from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.fitting import Fitted, fit
from ds_distill.routing.gate import Gate
from ds_distill.routing.label_rows import of_rows
from ds_distill.routing.partial_teachers import classes_of
from ds_distill.routing.policies import Asked, Policy
from ds_distill.seen import Target, two_classes
from ds_distill.types import Signals

TWO = ("without", "with")
"""The two classes of a label."""


def of_label(signals: Mapping[str, Signals], label: int) -> dict[str, Signals]:
    """Teachers' signals on one label: the logits [0, z] of its absence and presence, [n, 2], in
    place of [n, L]. Raises ValueError for a teacher that knows some of the labels."""
    for name in classes_of(signals):
        raise ValueError(
            f"teacher {name!r} knows some of the labels, which is for examples with one label each"
        )
    return {
        name: replace(outputs, output=two_classes(outputs.logits[:, label]))
        for name, outputs in signals.items()
    }


def joined(targets: Sequence[Target]) -> Target:
    """The target of n rows from those of each label: logits [n, L], weights [T, n, L]."""
    logits = [target.logits for target in targets]
    weights = torch.stack([target.weights for target in targets], dim=-1)
    if any(of is None for of in logits):
        return Target(None, weights)
    return Target(torch.stack([of[:, 1] - of[:, 0] for of in logits if of is not None], 1), weights)


def by_label(policy: Policy, seen: Asked, fitted: FittedByLabel | None) -> Target:
    """A policy's target of n rows of L labels: it is asked about n * L rows of two classes."""
    count, many = seen.batch.labels.shape
    of_all = None if fitted is None else fitted.of_rows(count * many)
    target = policy(replace(seen.by_label(), fitted=of_all))
    weights = target.weights.unflatten(1, (count, many))
    if target.logits is None:
        return Target(None, weights)
    return Target((target.logits[:, 1] - target.logits[:, 0]).view(count, many), weights)


@dataclass(frozen=True)
class FittedByLabel:
    """What routing knows of the teachers, of each label."""

    labels: tuple[str, ...]
    of: tuple[Fitted, ...]
    """Of each label, over the classes TWO."""

    @property
    def teachers(self) -> tuple[str, ...]:
        return self.of[0].teachers

    @property
    def reads_states(self) -> bool:
        """Whether a gate does."""
        return any(fitted.reads_states for fitted in self.of)

    @property
    def f1(self) -> np.ndarray:
        """Of each teacher on each label: float64 [T, L], 0 where it finds none."""
        return f1_of([fitted.table for fitted in self.of])

    @property
    def experts(self) -> dict[str, str]:
        """The teacher with the best F1 of each label; of equals the one with the better mean."""
        best = experts_by_f1(self.f1, self.teachers)
        return {label: self.teachers[t] for label, t in zip(self.labels, best, strict=True)}

    def of_rows(self, count: int) -> Fitted:
        """What a policy reads for the rows of all labels, `count` together; see `by_label`."""
        stacked = self._stacked
        return replace(
            stacked,
            temperatures={
                name: of_rows(torch.as_tensor(of), count)
                for name, of in stacked.temperatures.items()
            },
        )

    @cached_property
    def _stacked(self) -> Fitted:
        """That of all labels, with an axis of L in front; temperatures are float32 [L, 1]."""
        gates = [of.gate for of in self.of if of.gate is not None]
        gate = None
        if len(gates) == len(self.of):
            weights = torch.stack([of.weight for of in gates])
            gate = Gate(weights, torch.stack([of.bias for of in gates]), self.reads_states)
        return replace(
            self.of[0],
            table=LabelTables.stacked([of.table for of in self.of]),
            temperatures={
                name: torch.tensor([of.temperatures[name] for of in self.of])[:, None]
                for name in self.teachers
            },
            gate=gate,
        )

    def to(self, device: torch.device) -> FittedByLabel:
        return FittedByLabel(self.labels, tuple(fitted.to(device) for fitted in self.of))

    def to_record(self) -> dict[str, Any]:
        """For the phase's record: JSON values. `overall` is the mean F1 of the labels."""
        f1 = self.f1
        return {
            "overall": dict(zip(self.teachers, f1.mean(axis=1).tolist(), strict=True)),
            "f1": {
                teacher: dict(zip(self.labels, row, strict=True))
                for teacher, row in zip(self.teachers, f1.tolist(), strict=True)
            },
            "experts": self.experts,
            "temperatures": {
                label: fitted.temperatures
                for label, fitted in zip(self.labels, self.of, strict=True)
            },
        }

    def save(self, path: Path) -> None:
        """Write one safetensors file; the small things are JSON in its header."""
        parts = [fitted.parts() for fitted in self.of]
        tensors = {
            f"{number}.{name}": tensor
            for number, (of, _) in enumerate(parts)
            for name, tensor in of.items()
        }
        header = {"labels": self.labels, "of": [header for _, header in parts]}
        with new_file(path) as aside:
            save_file(tensors, aside, {"fitted": json.dumps(header)})


def f1_of(tables: Sequence[ExpertiseTable]) -> np.ndarray:
    """Of each teacher on each label: float64 [T, L], 0 where it finds none. tables: of each label,
    over the classes TWO."""
    columns = []
    for table in tables:
        right, total = table.correct, table.total
        both, false = right[:, 1], total[0] - right[:, 0]
        columns.append(2 * both / np.maximum(both + false + total[1], 1))
    return np.stack(columns, axis=1)


def experts_by_f1(f1: np.ndarray, teachers: Sequence[str]) -> np.ndarray:
    """The teacher with the best F1 of each label, int64 [L]; of equals the one with the better
    mean. f1: float64 [T, L]."""
    order = sorted(range(len(f1)), key=lambda t: (-f1[t].mean(), teachers[t]))
    return np.array(order)[f1[order].argmax(axis=0)]


class LabelTable(ExpertiseTable):
    """The expertise table of one label, over the classes TWO. Teachers are ranked by their F1: by
    accuracy the best at a rare label would be the one that never predicts it."""

    @staticmethod
    def of(table: ExpertiseTable) -> LabelTable:
        return LabelTable(table.teachers, table.labels, table.correct, table.total)

    @property
    def overall(self) -> np.ndarray:
        """The F1: float64 [T]."""
        return f1_of([self])[:, 0]

    @property
    def experts(self) -> np.ndarray:
        """The best teacher, for the label's absence and its presence: int64 [2]."""
        return self.ranking[[0, 0]]


@dataclass(frozen=True, eq=False)
class LabelTables(ExpertiseTable):
    """The tables of L labels: `correct` int64 [L, T, 2], `total` [L, 2]."""

    of: Sequence[ExpertiseTable]

    @staticmethod
    def stacked(of: Sequence[ExpertiseTable]) -> LabelTables:
        correct, total = np.stack([one.correct for one in of]), np.stack([one.total for one in of])
        return LabelTables(of[0].teachers, TWO, correct, total, of)

    @property
    def ranking(self) -> np.ndarray:
        """int64 [L, T]."""
        return np.stack([one.ranking for one in self.of])

    @property
    def experts(self) -> np.ndarray:
        """int64 [L, 2]."""
        return np.stack([one.experts for one in self.of])


def fit_label(*given: Any, **how: Any) -> Fitted:
    """As `fit`, on one label: over the classes TWO, with teachers ranked by F1."""
    fitted = fit(*given, **how)
    return replace(fitted, table=LabelTable.of(fitted.table))


def fit_by_label(
    signals: Mapping[str, Signals],
    truth: np.ndarray,
    keys: torch.Tensor,
    labels: Sequence[str],
    *,
    seed: int = 0,
    group_keys: torch.Tensor | None = None,
    advance: Callable[[], None] = lambda: None,
) -> FittedByLabel:
    """As `fit`, of each label. signals: by teacher, logits [N, L]. truth: int [N, L] of 0 and 1, -1
    in the rows of unlabelled examples, which are left out. advance: called for each label."""
    assert is_labelled(truth).any(), "nothing to fit on"
    of = []
    for n in range(len(labels)):
        mark("fits routing")
        given = of_label(signals, n), truth[:, n], keys, TWO
        of.append(fit_label(*given, seed=seed, group_keys=group_keys))
        advance()
    return FittedByLabel(tuple(labels), tuple(of))


def load_fitted(path: Path) -> Fitted | FittedByLabel:
    """What an expertise phase has fitted. Raises OSError when there is no such file."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fitted"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "labels" not in header:
        return Fitted.of_parts(tensors, header)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in header["labels"]]
    for name, tensor in tensors.items():
        number, _, own = name.partition(".")
        parts[int(number)][own] = tensor
    of = (Fitted.of_parts(*both) for both in zip(parts, header["of"], strict=True))
    ranked = (replace(fitted, table=LabelTable.of(fitted.table)) for fitted in of)
    return FittedByLabel(tuple(header["labels"]), tuple(ranked))


def check_states(path: Path) -> None:
    """Raises UserError where a gate was fitted, by an earlier version, on first tokens' states. To
    be called where a teacher's head reads the mean of all: the gate would read that now."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fitted"])
    for part in header.get("of", [header]):
        if part["reads_states"] and "states" not in part:
            raise UserError(
                f"{path}: an earlier version of ds_distill fitted this gate to first tokens' "
                "states, and a teacher's head reads the mean of all tokens', which the gate is "
                "given now. Begin anew, in another folder (--folder)."
            )
