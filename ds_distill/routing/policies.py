"""Routing policies: one function type, from teacher signals to a target.

T teachers, n rows, C classes. A policy is pure: what is random in it is a function of (seed,
epoch, example key). A policy is one function and one entry
(`ds_distill.recipe.policies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from ds_distill.keys import name_id, uniform
from ds_distill.recipe.policies import ByExpertise, Mix, Routing, Weighted, not_fitted
from ds_distill.routing.calibration import FLOOR, Temperature, log_probabilities
from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.fitting import Fitted
from ds_distill.routing.gate import calibrated_average
from ds_distill.routing.label_rows import of_rows
from ds_distill.routing.partial_teachers import Classes, unknown_to_all
from ds_distill.types import Signals

TEACHER_CHOICE = 101
"""Purpose of the random policy's numbers."""


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy may look at."""

    logits: Mapping[str, torch.Tensor]
    """[n, C] by teacher; [n, K] of a partial one."""
    labels: torch.Tensor
    """int64 [n], -100 where unknown."""
    keys: torch.Tensor
    """int64 [n, 2]."""
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Last layer's state of each row, [n, H] by teacher; for the gate. Of many labels' rows that of
    each example, which all its labels share."""
    fitted: Fitted | None = None
    """What the expertise phase fitted; for the policies that need it."""
    temperature: float = 1.0
    """Of the KL term: probabilities are mixed at it."""
    seed: int = 0
    epoch: int = 0
    teacher_ids: torch.Tensor | None = None
    """int64 [n]: see `Batch.teacher_ids`. Only a policy whose entry needs it gets it."""
    classes: Classes = field(default_factory=dict)
    """Of partial teachers. Only a policy whose entry takes them gets any."""


@dataclass(frozen=True)
class Target:
    """What a policy makes of its inputs."""

    logits: torch.Tensor | None
    """float32 [n, C]: softmax(logits / T) is the target. None where losses are mixed instead:
    then the loss is the sum over teachers of weight * loss against that teacher. Where an example
    has any number of L labels: [n, L], the logit of each."""
    weights: torch.Tensor
    """float32 [T, n]: how much each teacher is followed, teachers in the order of the inputs; of
    many labels [T, n, L]."""

    def at(self, rows: torch.Tensor) -> Target:
        """The target of rows of a batch's row set, int64 [k]."""
        if len(rows) == self.weights.shape[1]:
            return self
        logits = None if self.logits is None else self.logits.index_select(0, rows)
        return Target(logits, self.weights.index_select(1, rows))


Policy = Callable[[PolicyInputs, Any], Target]
"""(what it may look at, the settings of its entry) -> target."""


def mixed(
    inputs: PolicyInputs,
    weights: torch.Tensor,
    mix: Mix,
    temperatures: Mapping[str, Temperature] | None = None,
) -> Target:
    """The weighted sum of the teachers' logits, or of their probabilities at the inputs'
    temperature, or no target where losses are summed instead.

    weights: float32 [T, n]. temperatures: what each teacher's logits are divided by first.
    """
    if mix == "losses":
        return Target(None, weights)
    scores = {
        name: values.float() / (temperatures[name] if temperatures else 1.0)
        for name, values in inputs.logits.items()
    }
    # Summed one by one: a stack of [T, n, V] would not fit beside a large vocabulary.
    start = 0.0 if mix == "logits" else -torch.inf
    first = next(iter(scores.values()))
    total = torch.full_like(first, start)
    for weight, values in zip(weights[:, :, None], scores.values(), strict=True):
        if mix == "logits":
            # A logit may be -inf, and 0 * -inf is NaN.
            total += torch.where(weight > 0, weight * values, 0.0)
        else:  # in logarithms: a probability too small for float32 has a finite logit
            log_probs = torch.log_softmax(values / inputs.temperature, dim=-1)
            total = torch.logaddexp(total, weight.log() + log_probs)
    if mix == "logits":
        return Target(total, weights)
    # Normalised, for weights that do not sum to 1.
    return Target(inputs.temperature * torch.log_softmax(total, dim=-1), weights)


def average(inputs: PolicyInputs, routing: Weighted) -> Target:
    """All teachers alike (thesis 4.8). Of partial teachers only losses are mixed."""
    return mixed(inputs, _alike(inputs), routing.mix or "logits")


def calibrated(inputs: PolicyInputs, routing: Weighted) -> Target:
    """All teachers alike, each at the temperature that calibrates it on validation: a
    probability then is the share of predictions that are right, and the confident teacher counts
    for more."""
    temperatures = _fitted(inputs).temperatures
    return mixed(inputs, _alike(inputs), routing.mix or "probabilities", temperatures)


def best(inputs: PolicyInputs, routing: Weighted) -> Target:
    """The teacher that is most accurate overall, for every row."""
    ranking, _ = _ranks(inputs)
    return mixed(inputs, _one_hot(ranking[:, 0], len(inputs.logits)), routing.mix or "logits")


def random(inputs: PolicyInputs, routing: Weighted) -> Target:
    """One teacher per example and epoch, all equally likely (thesis 4.9)."""
    numbers = torch.stack(
        [
            # A stream per teacher's name: the choice does not depend on the teachers' order.
            uniform(
                inputs.keys,
                inputs.seed,
                inputs.epoch,
                TEACHER_CHOICE,
                xxhash.xxh32_intdigest(name.encode()),
            )
            for name in inputs.logits
        ]
    )
    choice = numbers.argmax(dim=0)
    return mixed(inputs, _one_hot(choice, len(inputs.logits)), routing.mix or "logits")


def column(inputs: PolicyInputs, routing: Weighted) -> Target:
    """The teacher that the data name for each row; where they name none, all alike."""
    assert inputs.teacher_ids is not None, "the policy needs what the data name"
    named = torch.stack([inputs.teacher_ids == name_id(name) for name in inputs.logits])
    weights = torch.where(named.any(dim=0), named.float(), _alike(inputs))
    return mixed(inputs, weights, routing.mix or "logits")


def expertise(inputs: PolicyInputs, routing: ByExpertise) -> Target:
    """The teacher that predicts a class it is the best at (thesis 4.6 and 4.7).

    Exactly one such expert: it. Several, or none, is a conflict: the most accurate teacher of
    all (`conflict: best-teacher`, sections 4.6.1 and 4.7), the most accurate of those in
    conflict (`best-expert`, section 1.3), which with none is the most accurate of all again,
    or the one of those in conflict, with none of all, that is most confident of its class, each
    calibrated on validation (`most-confident`, ours).
    """
    ranking, experts = _ranks(inputs)
    is_expert = torch.stack(
        [
            experts.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0] == teacher
            for teacher, scores in enumerate(inputs.logits.values())
        ]
    )  # [T, n]
    if routing.conflict == "most-confident":
        in_conflict = is_expert | ~is_expert.any(dim=0)
        value = torch.where(in_conflict, _confidence(inputs), -torch.inf)
    else:
        value = is_expert.float()
    # Of equals the more accurate, so that the order of teachers does not matter.
    best = value.T.gather(1, ranking).argmax(dim=1, keepdim=True)
    if routing.conflict == "best-teacher":
        best = torch.where(is_expert.sum(dim=0)[:, None] == 1, best, 0)
    choice = ranking.gather(1, best)[:, 0]
    return mixed(inputs, _one_hot(choice, len(inputs.logits)), routing.mix or "logits")


def gate(inputs: PolicyInputs, routing: Routing) -> Target:
    """The learned gate's target; see `ds_distill.routing.gate`. It is no mixture of the
    teachers; see `_followed` for its weights. It reads all teachers: rows of which one says nothing
    have the mean of the others' calibrated probabilities. Raises ValueError where none was
    fitted, and where those others do not know all classes."""
    fitted = _fitted(inputs)
    if fitted.gate is None:
        raise ValueError(f"no gate: {not_fitted(len(fitted.table.labels))['gate']}")
    if len(inputs.logits) < len(fitted.table.teachers):
        if not inputs.classes:
            return mixed(inputs, _alike(inputs), "probabilities", fitted.temperatures)
        count = len(fitted.table.labels)
        if unknown_to_all([*inputs.logits], inputs.classes, count):
            raise ValueError(
                "the gate reads all teachers: on rows of which one says nothing the others "
                f"({', '.join(inputs.logits)}) must know all classes, and they do not"
            )
        target = calibrated_average(inputs.logits, fitted.temperatures, inputs.classes, count)
        return Target(target, _followed(inputs, target))
    target = fitted.gate.logits(inputs.logits, inputs.states, fitted.temperatures, inputs.classes)
    return Target(target, _followed(inputs, target))


def ca_mkd(inputs: PolicyInputs, routing: Weighted) -> Target:
    """(1 - exp(CE_k) / sum_j exp(CE_j)) / (K - 1), CE_k of teacher k with the label: the
    confidence-aware weights of CA-MKD. A single teacher has weight 1; on a row without a
    label all teachers count alike."""
    weights = _alike(inputs)
    count = len(weights)
    if count > 1:
        by_label = (1.0 - torch.softmax(_label_errors(inputs), dim=0)) / (count - 1)
        weights = torch.where(inputs.labels >= 0, by_label, weights)
    return mixed(inputs, weights, routing.mix or "losses")


def mt_bert(inputs: PolicyInputs, routing: Weighted) -> Target:
    """1 / (1 + CE(label, teacher)): MT-BERT's weights, which do not sum to 1. A row without
    a label has weight 1 for every teacher."""
    return mixed(inputs, 1.0 / (1.0 + _label_errors(inputs)), routing.mix or "losses")


def _fitted(inputs: PolicyInputs) -> Fitted:
    assert inputs.fitted is not None, "the policy needs what an expertise phase fits"
    return inputs.fitted


def _alike(inputs: PolicyInputs) -> torch.Tensor:
    """The same weight for all teachers: float32 [T, n]."""
    count = len(inputs.logits)
    return inputs.labels.new_full((count, len(inputs.labels)), 1, dtype=torch.float32) / count


def _followed(inputs: PolicyInputs, target: torch.Tensor) -> torch.Tensor:
    """How much each teacher is behind a target that is no mixture: its calibrated probability
    of the target's class, as a share of all teachers': float32 [T, n]."""
    temperatures = _fitted(inputs).temperatures
    choice = target.argmax(dim=-1, keepdim=True)
    behind = []
    for name, scores in inputs.logits.items():
        log_probs = log_probabilities(scores.float(), temperatures[name])
        of_all = Signals(log_probs, classes=inputs.classes.get(name))
        behind.append(of_all.over_all(target.shape[1], -FLOOR).gather(1, choice)[:, 0])
    return torch.softmax(torch.stack(behind), dim=0)


def _confidence(inputs: PolicyInputs) -> torch.Tensor:
    """Largest calibrated probability of each teacher: float32 [T, n]."""
    temperatures = _fitted(inputs).temperatures
    return torch.stack(
        [
            torch.softmax(scores.float() / temperatures[name], dim=-1).amax(dim=-1)
            for name, scores in inputs.logits.items()
        ]
    )


def _label_errors(inputs: PolicyInputs) -> torch.Tensor:
    """Cross-entropy of each teacher with the label: float32 [T, n], 0 on unlabelled rows.

    Finite also where a teacher has the logit -inf for the label.
    """
    errors = [
        F.cross_entropy(scores.float(), inputs.labels, reduction="none")
        for scores in inputs.logits.values()
    ]
    return torch.stack(errors).clamp(max=1e30)


def _ranks(inputs: PolicyInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the table's `ranking`, int64 [n, T], and `experts`, [n, C], as numbers of the
    inputs' teachers. One that says nothing of these rows has no rank, and as an expert is -1."""
    device, count = inputs.labels.device, len(inputs.labels)
    ranking, experts = _ranks_on(device, _fitted(inputs).table, tuple(inputs.logits))
    return of_rows(ranking, count), of_rows(experts, count)


@lru_cache(maxsize=64)
def _ranks_on(
    device: torch.device, table: ExpertiseTable, names: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Made once, as `numbers_on`."""
    position = {name: number for number, name in enumerate(names)}
    numbers = np.array([position.get(name, -1) for name in table.teachers])
    ranking, experts = numbers[table.ranking], numbers[table.experts]
    ranking = ranking[ranking >= 0].reshape(*ranking.shape[:-1], len(names))
    return torch.from_numpy(ranking).to(device), torch.from_numpy(experts).to(device)


@lru_cache(maxsize=64)
def numbers_on(device: torch.device, *numbers: int) -> torch.Tensor:
    """int64 [N], which nobody may change: made once, because a copy to a GPU waits for it."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _one_hot(choice: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([choice == teacher for teacher in range(count)]).float()
