"""Routing policies: functions of what is seen of a batch, to a target.

T teachers, n rows, C classes. A policy is pure: what is random in it is a function of (seed,
epoch, example key). It chooses among the teachers that say something of a row (`Seen.reported`);
the others weigh 0. A policy is one function and one entry (`ds_distill.recipe.policies`).
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
from ds_distill.recipe.policies import Mix, not_fitted
from ds_distill.routing.calibration import FLOOR, Temperature, log_probabilities
from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.fitting import Fitted
from ds_distill.routing.gate import calibrated_average
from ds_distill.routing.label_rows import of_rows
from ds_distill.routing.partial_teachers import classes_of, unknown_rows
from ds_distill.seen import Seen, Target
from ds_distill.types import Signals

TEACHER_CHOICE = 101
"""Purpose of the random policy's numbers."""

NOTHING = Signals(None)
"""Of a student, before it is asked."""


@dataclass(frozen=True)
class Asked(Seen):
    """What a policy sees: the batch, the teachers' signals, and what its router knows. Where an
    example has any number of labels each is a row of two classes, without it and with it."""

    settings: Any = None
    """Of its entry."""
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Last layer's state of each row, [n, H] by teacher; for the gate. Of many labels' rows that of
    each example, which all its labels share."""
    fitted: Fitted | None = None
    """What the expertise phase fitted; for the policies that need it."""
    temperature: float = 1.0
    """Of the KL term: probabilities are mixed at it."""
    seed: int = 0


Policy = Callable[[Asked], Target]


def mixed(
    seen: Asked,
    weights: torch.Tensor,
    mix: Mix = "logits",
    temperatures: Mapping[str, Temperature] | None = None,
) -> Target:
    """The weighted sum of the teachers' logits, or of their probabilities at the router's
    temperature, or no target where losses are summed instead. A teacher that says nothing of a row
    weighs 0 there.

    weights: float32 [T, n]. mix: where the settings name none. temperatures: what each teacher's
        logits are divided by first.
    """
    mix = getattr(seen.settings, "mix", None) or mix
    weights = weights.masked_fill(~seen.reported, 0.0)
    if mix == "losses":
        return Target(None, weights)
    total: torch.Tensor | None = None
    # Summed one by one: a stack of [T, n, V] would not fit beside a large vocabulary.
    for weight, (name, of) in zip(weights[:, :, None], seen.teachers.items(), strict=True):
        scores = of.logits.float() / (temperatures[name] if temperatures else 1.0)
        follows = weight > 0  # a logit may be -inf, and 0 * -inf is NaN
        if mix == "logits":
            part = torch.where(follows, weight * scores, 0.0)
            total = part if total is None else total + part
        else:  # in logarithms: a probability too small for float32 has a finite logit
            log_probs = torch.log_softmax(scores / seen.temperature, dim=-1)
            part = torch.where(follows, weight.log() + log_probs, -torch.inf)
            total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    if mix == "probabilities":
        # Normalised, for weights that do not sum to 1; a row that follows nobody has none.
        total = torch.where((weights > 0).any(dim=0)[:, None], total, 0.0)
        total = seen.temperature * torch.log_softmax(total, dim=-1)
    return Target(total, weights)


def average(seen: Asked) -> Target:
    """All teachers alike (thesis 4.8). Of partial teachers only losses are mixed."""
    return mixed(seen, alike(seen))


def calibrated(seen: Asked) -> Target:
    """All teachers alike, each at the temperature that calibrates it on validation: a
    probability then is the share of predictions that are right, and the confident teacher counts
    for more."""
    return mixed(seen, alike(seen), "probabilities", _fitted(seen).temperatures)


def best(seen: Asked) -> Target:
    """The teacher that is most accurate overall, for every row."""
    ranking, _ = _ranks(seen)
    return mixed(seen, _only(seen, _first(seen.reported, ranking)))


def random(seen: Asked) -> Target:
    """One teacher per example and epoch, all equally likely (thesis 4.9)."""
    keys, epoch = seen.batch.keys, seen.batch.epoch
    # A stream per teacher's name: the choice does not depend on the teachers' order.
    streams = [xxhash.xxh32_intdigest(name.encode()) for name in seen.teachers]
    numbers = torch.stack([uniform(keys, seen.seed, epoch, TEACHER_CHOICE, s) for s in streams])
    return mixed(seen, _only(seen, numbers.masked_fill(~seen.reported, -1.0).argmax(dim=0)))


def column(seen: Asked) -> Target:
    """The teacher that the data name for each row; where they name none, all alike."""
    ids = seen.batch.teacher_ids
    assert ids is not None, "the policy needs what the data name"
    named = torch.stack([ids == name_id(name) for name in seen.teachers]) & seen.reported
    return mixed(seen, torch.where(named.any(dim=0), named.float(), alike(seen)))


def expertise(seen: Asked) -> Target:
    """The teacher that predicts a class it is the best at (thesis 4.6 and 4.7).

    Exactly one such expert: it. Several, or none, is a conflict: the most accurate teacher of
    all (`conflict: best-teacher`, sections 4.6.1 and 4.7), the most accurate of those in
    conflict (`best-expert`, section 1.3), which with none is the most accurate of all again,
    or the one of those in conflict, with none of all, that is most confident of its class, each
    calibrated on validation (`most-confident`, ours).
    """
    reported, (ranking, experts) = seen.reported, _ranks(seen)
    is_expert = reported & torch.stack(
        [
            experts.gather(1, of.logits.argmax(dim=-1, keepdim=True))[:, 0] == teacher
            for teacher, of in enumerate(seen.teachers.values())
        ]
    )  # [T, n]
    rivals = torch.where(is_expert.any(dim=0), is_expert, reported)
    conflict = seen.settings.conflict
    if conflict == "most-confident":
        value = torch.where(rivals, _confidence(seen), -torch.inf)
        # Of equals the more accurate, so that the order of teachers does not matter.
        at = value.T.gather(1, ranking).argmax(dim=1, keepdim=True)
        return mixed(seen, _only(seen, ranking.gather(1, at)[:, 0]))
    if conflict == "best-teacher":
        rivals = torch.where(is_expert.sum(dim=0) == 1, is_expert, reported)
    return mixed(seen, _only(seen, _first(rivals, ranking)))


def gate(seen: Asked) -> Target:
    """The learned gate's target; see `ds_distill.routing.gate`. It is no mixture of the
    teachers; see `_followed` for its weights. It reads all teachers: rows of which one says nothing
    have the mean of the others' calibrated probabilities. Raises ValueError where none was
    fitted, and where those others do not know all classes."""
    fitted = _fitted(seen)
    if fitted.gate is None:
        raise ValueError(f"no gate: {not_fitted(len(fitted.table.labels))['gate']}")
    logits = {name: of.logits for name, of in seen.teachers.items()}
    classes, temperatures = classes_of(seen.teachers), fitted.temperatures
    target = fitted.gate.logits(logits, seen.states, temperatures, classes)
    found = Target(target, _followed(seen, target))
    if all(of.reported is None for of in seen.teachers.values()):
        return found
    reported, count = seen.reported, target.shape[1]
    if not classes:
        others = mixed(seen, alike(seen), "probabilities", temperatures)
    elif unknown_rows(reported, [*logits], classes, count).any():
        raise ValueError(
            "the gate reads all teachers: on rows of which one says nothing the others must know "
            f"all classes, and {', '.join(classes)} know some"
        )
    else:
        average = calibrated_average(logits, temperatures, classes, count, reported)
        others = Target(average, _followed(seen, average))
    assert others.logits is not None
    whole = reported.all(dim=0)
    logits_of_rows = torch.where(whole[:, None], target, others.logits)
    return Target(logits_of_rows, torch.where(whole, found.weights, others.weights))


def ca_mkd(seen: Asked) -> Target:
    """(1 - exp(CE_k) / sum_j exp(CE_j)) / (K - 1), CE_k of teacher k with the label: the
    confidence-aware weights of CA-MKD. A single teacher has weight 1; on a row without a
    label all teachers count alike."""
    weights, reported = alike(seen), seen.reported
    errors = _label_errors(seen).masked_fill(~reported, -torch.inf)
    count = reported.sum(dim=0)
    by_label = (1.0 - torch.softmax(errors, dim=0)) / (count - 1).clamp(min=1)
    by_label = torch.where((count > 1) & (seen.batch.labels >= 0), by_label, weights)
    return mixed(seen, by_label, "losses")


def mt_bert(seen: Asked) -> Target:
    """1 / (1 + CE(label, teacher)): MT-BERT's weights, which do not sum to 1. A row without
    a label has weight 1 for every teacher."""
    return mixed(seen, 1.0 / (1.0 + _label_errors(seen)), "losses")


def _fitted(seen: Asked) -> Fitted:
    assert seen.fitted is not None, "the policy needs what an expertise phase fits"
    return seen.fitted


def alike(seen: Seen) -> torch.Tensor:
    """The same weight for all teachers that say something of a row: float32 [T, n]."""
    reported = seen.reported.float()
    return reported / reported.sum(dim=0).clamp(min=1)


def _followed(seen: Asked, target: torch.Tensor) -> torch.Tensor:
    """How much each teacher is behind a target that is no mixture: its calibrated probability
    of the target's class, as a share of all teachers': float32 [T, n]."""
    temperatures, reported = _fitted(seen).temperatures, seen.reported
    choice = target.argmax(dim=-1, keepdim=True)
    behind = []
    for name, of in seen.teachers.items():
        log_probs = log_probabilities(of.logits.float(), temperatures[name])
        of_all = Signals(log_probs, classes=of.classes)
        behind.append(of_all.over_all(target.shape[1], -FLOOR).gather(1, choice)[:, 0])
    shares = torch.softmax(torch.stack(behind).masked_fill(~reported, -torch.inf), dim=0)
    return torch.where(reported, shares, 0.0)


def _confidence(seen: Asked) -> torch.Tensor:
    """Largest calibrated probability of each teacher: float32 [T, n]."""
    temperatures = _fitted(seen).temperatures
    return torch.stack(
        [
            torch.softmax(of.logits.float() / temperatures[name], dim=-1).amax(dim=-1)
            for name, of in seen.teachers.items()
        ]
    )


def _label_errors(seen: Asked) -> torch.Tensor:
    """Cross-entropy of each teacher with the label: float32 [T, n], 0 on unlabelled rows.

    Finite also where a teacher has the logit -inf for the label.
    """
    errors = [
        F.cross_entropy(of.logits.float(), seen.batch.labels, reduction="none")
        for of in seen.teachers.values()
    ]
    return torch.stack(errors).clamp(max=1e30)


def _ranks(seen: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the table's `ranking`, int64 [n, T], and `experts`, [n, C], as numbers of the
    teachers that are seen."""
    device, count = seen.batch.labels.device, len(seen.batch.labels)
    ranking, experts = _ranks_on(device, _fitted(seen).table, tuple(seen.teachers))
    return of_rows(ranking, count), of_rows(experts, count)


@lru_cache(maxsize=64)
def _ranks_on(
    device: torch.device, table: ExpertiseTable, names: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Made once, because a copy to a GPU waits for it; nobody may change it."""
    numbers = np.array([names.index(name) for name in table.teachers])
    ranking, experts = numbers[table.ranking], numbers[table.experts]
    return torch.from_numpy(ranking).to(device), torch.from_numpy(experts).to(device)


def _first(among: torch.Tensor, ranking: torch.Tensor) -> torch.Tensor:
    """The first in each row's ranking, [n, T], of some teachers, bool [T, n]: int64 [n]."""
    at = among.T.gather(1, ranking).byte().argmax(dim=1, keepdim=True)
    return ranking.gather(1, at)[:, 0]


def _only(seen: Seen, choice: torch.Tensor) -> torch.Tensor:
    """Weights of 1 for the chosen teacher of each row, int64 [n]."""
    teachers = torch.arange(len(seen.teachers), device=choice.device)[:, None]
    return (choice == teachers).float()
