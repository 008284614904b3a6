"""All that routing learns from a labelled split, fitted at once and stored with the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ds_distill.files import new_file
from ds_distill.keys import uniform
from ds_distill.recipe.policies import GATE_CLASSES
from ds_distill.routing.calibration import Temperature, fit_temperature
from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.gate import FOLDS, Gate, fit_gate
from ds_distill.routing.partial_teachers import classes_of, own_examples, unknown_to_all
from ds_distill.types import Signals

FOLD = 102
"""Purpose of the numbers that assign examples to folds."""

GATE_EXAMPLE = 103
"""Purpose of the numbers that choose a gate's examples."""

GATE_EXAMPLES = 10_000
"""What a gate is fitted on at most, chosen by the hash of the text: the time of a fit grows with
its examples, and it has too few parameters to need more."""

STATES = -1
"""The layer whose states the gate reads."""


@dataclass(frozen=True)
class Fitted:
    """What routing knows of the teachers. T teachers, C classes."""

    table: ExpertiseTable
    temperatures: Mapping[str, Temperature]
    """By teacher: softmax(logits / temperature) is calibrated."""
    gate: Gate | None
    """None with more than GATE_CLASSES classes."""
    keys: torch.Tensor
    """int64 [N, 2]: of the examples it was fitted on."""
    classes: dict[str, list[int]] = field(default_factory=dict)
    """By partial teacher: the class ids that it knows."""

    def to(self, device: torch.device) -> Fitted:
        return replace(self, gate=None if self.gate is None else self.gate.to(device))

    @property
    def teachers(self) -> tuple[str, ...]:
        return self.table.teachers

    @property
    def reads_states(self) -> bool:
        """Whether the gate does."""
        return self.gate is not None and self.gate.reads_states

    @property
    def experts(self) -> dict[str, str]:
        """The best teacher of each class."""
        return {
            label: self.teachers[teacher]
            for label, teacher in zip(self.table.labels, self.table.experts, strict=True)
        }

    def to_record(self) -> dict[str, Any]:
        """For the phase's record: JSON values."""
        overall = dict(zip(self.teachers, self.table.overall.tolist(), strict=True))
        return {"overall": overall, "experts": self.experts, "temperatures": self.temperatures}

    def parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What a file holds of it: tensors, and JSON values."""
        tensors = {"keys": self.keys.contiguous()}
        if self.gate is not None:
            tensors |= {"gate.weight": self.gate.weight, "gate.bias": self.gate.bias}
        header = {
            "table": self.table.to_json(),
            "temperatures": self.temperatures,
            "reads_states": self.reads_states,
            "states": "what the head reads",  # before, the first token's; see `check_states`
            "classes": self.classes,
        }
        return tensors, header

    @staticmethod
    def of_parts(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> Fitted:
        table = ExpertiseTable.from_json(header["table"])
        gate = None
        if "gate.weight" in tensors:
            gate = Gate(tensors["gate.weight"], tensors["gate.bias"], header["reads_states"])
        return Fitted(
            table,
            header["temperatures"],
            gate,
            tensors["keys"],
            header.get("classes", {}),
        )

    def save(self, path: Path) -> None:
        """Write one safetensors file; the small things are JSON in its header."""
        tensors, header = self.parts()
        with new_file(path) as aside:
            save_file(tensors, aside, {"fitted": json.dumps(header)})


def fit(
    signals: Mapping[str, Signals],
    truth: np.ndarray,
    keys: torch.Tensor,
    labels: Sequence[str],
    *,
    seed: int = 0,
    group_keys: torch.Tensor | None = None,
) -> Fitted:
    """Fit everything on one labelled split; with more than GATE_CLASSES classes all but the gate.

    signals: by teacher, logits float [N, C], of a partial teacher [N, K], and, for a gate that
        reads them, the states of the last layer, float [N, H]. truth: int [N] class ids, -1
        unlabelled (left out). keys: int64 [N, 2]. group_keys: int64 [N, 2]: examples of one group
        are in one fold; None: `keys`.

    Raises ValueError when no teacher knows a class.
    """
    partial, count = classes_of(signals), len(labels)
    if unknown := unknown_to_all(list(signals), partial, count):
        raise ValueError(f"no teacher knows {', '.join(labels[number] for number in unknown)}")
    known = torch.from_numpy(truth >= 0)
    classes = torch.tensor(truth)[known].long()
    logits = {name: outputs.logits[known].float() for name, outputs in signals.items()}
    states = states_of(signals)
    temperatures = {
        name: fit_temperature(*own_examples(scores, classes, partial.get(name), count))
        for name, scores in logits.items()
    }
    group_keys = (keys if group_keys is None else group_keys)[known]
    keys = keys[known]
    gate = None
    if count <= GATE_CLASSES:
        some = uniform(keys, seed, GATE_EXAMPLE).argsort()[:GATE_EXAMPLES]
        gate = fit_gate(
            {name: scores[some] for name, scores in logits.items()},
            {name: state[known][some] for name, state in states.items()},
            temperatures,
            classes[some],
            folds_of(group_keys[some], seed),
            partial,
            count,
        )
    return Fitted(
        ExpertiseTable.measure(
            {name: outputs.over_all(count).numpy() for name, outputs in signals.items()},
            truth,
            labels,
        ),
        temperatures,
        gate,
        keys,
        {name: numbers.tolist() for name, numbers in partial.items()},
    )


def states_of(signals: Mapping[str, Signals]) -> dict[str, torch.Tensor]:
    """The states that a gate reads, by teacher; empty unless all teachers have them."""
    found = {
        name: outputs.hidden[STATES]
        for name, outputs in signals.items()
        if STATES in outputs.hidden
    }
    return found if len(found) == len(signals) else {}


def folds_of(keys: torch.Tensor, *stream: int) -> torch.Tensor:
    """Fold of each example, a function of its key or group: int64 [N, 2] -> int64 [N]. Examples
    that are the same text are in the same fold."""
    return (uniform(keys, *stream, FOLD) * FOLDS).long()
