"""Routing policies: one function type, from what the teachers say to a target.

T teachers, n rows, C classes. A policy is pure: what is random in it is a function of (seed,
epoch, example key). To add one, write the function, add it to POLICIES and to the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
import xxhash

from ds_distill.data.keys import uniform
from ds_distill.recipe.phases import Routing
from ds_distill.routing.calibration import log_probabilities
from ds_distill.routing.fitted import Fitted

TEACHER_CHOICE = 101
"""Purpose of the random policy's numbers."""


@dataclass(frozen=True)
class Question:
    """What a policy may look at."""

    logits: Mapping[str, torch.Tensor]
    """[n, C] by teacher."""
    labels: torch.Tensor
    """int64 [n], -100 where unknown."""
    keys: torch.Tensor
    """int64 [n, 2]."""
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Last layer's state of each row, [n, H] by teacher; for the gate."""
    fitted: Fitted | None = None
    """What a labelled split says of the teachers; for the policies that need it."""
    temperature: float = 1.0
    """Of the KL term: probabilities are mixed at it."""
    seed: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class Routed:
    """A policy's answer."""

    logits: torch.Tensor | None
    """float32 [n, C]: softmax(logits / T) is the target. None where losses are mixed instead:
    then the loss is the sum over teachers of weight * loss against that teacher."""
    weights: torch.Tensor
    """float32 [T, n]: how much each teacher is followed, teachers in the question's order."""


Policy = Callable[[Question, Routing], Routed]


def mixed(
    question: Question,
    weights: torch.Tensor,
    mix: Literal["logits", "probabilities", "losses"],
    temperatures: Mapping[str, float] | None = None,
) -> Routed:
    """The weighted sum of the teachers' logits, or of their probabilities at the question's
    temperature, or no target where losses are summed instead.

    weights: float32 [T, n]. temperatures: what each teacher's logits are divided by first.
    """
    if mix == "losses":
        return Routed(None, weights)
    scores = {
        name: values.float() / (temperatures[name] if temperatures else 1.0)
        for name, values in question.logits.items()
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
            log_probs = torch.log_softmax(values / question.temperature, dim=-1)
            total = torch.logaddexp(total, weight.log() + log_probs)
    if mix == "logits":
        return Routed(total, weights)
    # Normalised, for weights that do not sum to 1.
    return Routed(question.temperature * torch.log_softmax(total, dim=-1), weights)


def average(question: Question, routing: Routing) -> Routed:
    """All teachers alike (thesis 4.8)."""
    return mixed(question, _alike(question), routing.mix or "logits")


def calibrated(question: Question, routing: Routing) -> Routed:
    """All teachers alike, each at the temperature that calibrates it on validation: its
    probabilities then mean what they say, and the confident teacher counts for more."""
    temperatures = _fitted(question).temperatures
    return mixed(question, _alike(question), routing.mix or "probabilities", temperatures)


def best(question: Question, routing: Routing) -> Routed:
    """The teacher that is most accurate overall, for every row."""
    choice = torch.full_like(question.labels, _table_order(question, "ranking")[0])
    return mixed(question, _one_hot(choice, len(question.logits)), routing.mix or "logits")


def random(question: Question, routing: Routing) -> Routed:
    """One teacher per example and epoch, all equally likely (thesis 4.9)."""
    draws = torch.stack(
        [
            # A stream per teacher's name: the choice does not depend on the teachers' order.
            uniform(
                question.keys,
                question.seed,
                question.epoch,
                TEACHER_CHOICE,
                xxhash.xxh32_intdigest(name.encode()),
            )
            for name in question.logits
        ]
    )
    choice = draws.argmax(dim=0)
    return mixed(question, _one_hot(choice, len(question.logits)), routing.mix or "logits")


def expertise(question: Question, routing: Routing) -> Routed:
    """The teacher that predicts a class it is the best at (thesis 4.6 and 4.7).

    Exactly one such expert: it. Several, or none, is a conflict: the most accurate teacher of
    all (`conflict: best-teacher`, sections 4.6.1 and 4.7), the most accurate of those in
    conflict (`best-expert`, section 1.3), which with none is the most accurate of all again,
    or the one of those in conflict, with none of all, that is most sure of its class, each
    calibrated on validation (`most-confident`, ours).
    """
    experts = torch.tensor(_table_order(question, "experts"), device=question.labels.device)
    ranking = _table_order(question, "ranking")
    is_expert = torch.stack(
        [
            experts[scores.argmax(dim=-1)] == teacher
            for teacher, scores in enumerate(question.logits.values())
        ]
    )  # [T, n]
    best_expert = torch.full_like(question.labels, ranking[0])
    for teacher in reversed(ranking):  # the most accurate is written last
        best_expert = torch.where(is_expert[teacher], teacher, best_expert)
    if routing.conflict == "best-teacher":
        one = is_expert.sum(dim=0) == 1
        best_expert = torch.where(one, best_expert, ranking[0])
    elif routing.conflict == "most-confident":
        in_conflict = is_expert | ~is_expert.any(dim=0)
        confidence = torch.where(in_conflict, _confidence(question), -torch.inf)
        # Of equals the more accurate, so that the order of teachers does not matter.
        best_expert = torch.tensor(ranking, device=experts.device)[
            confidence[ranking].argmax(dim=0)
        ]
    return mixed(question, _one_hot(best_expert, len(question.logits)), routing.mix or "logits")


def posterior(question: Question, routing: Routing) -> Routed:
    """p(class | what all teachers say), from their confusions on validation:

        p(c) prod_t p_t(c) / p(c), with p_t(c) = sum_j P(c | t says j) softmax(z_t / T_t)[j]

    which is Bayes' rule for teachers that err independently, given the class. It is no mixture
    of the teachers; see `_followed` for its weights.
    """
    fitted = _fitted(question)
    prior = fitted.prior.log()
    total = prior.expand_as(next(iter(question.logits.values())))
    for name in sorted(question.logits):  # a sum in floats depends on its order
        said = log_probabilities(question.logits[name].float(), fitted.temperatures[name])
        total = total + (said.exp() @ fitted.confusion[name].T).log() - prior
    target = torch.log_softmax(total, dim=-1)
    return Routed(target, _followed(question, target))


def gate(question: Question, routing: Routing) -> Routed:
    """The learned gate's target; see `ds_distill.routing.gate`. It is no mixture of the
    teachers; see `_followed` for its weights."""
    fitted = _fitted(question)
    target = fitted.gate.logits(question.logits, question.states, fitted.temperatures)
    return Routed(target, _followed(question, target))


def ca_mkd(question: Question, routing: Routing) -> Routed:
    """(1 - exp(CE_k) / sum_j exp(CE_j)) / (K - 1), CE_k of teacher k with the label: the
    confidence-aware weights of CA-MKD. A single teacher has weight 1; on a row without a
    label all teachers count alike."""
    weights = _alike(question)
    count = len(weights)
    if count > 1:
        by_label = (1.0 - torch.softmax(_label_errors(question), dim=0)) / (count - 1)
        weights = torch.where(question.labels >= 0, by_label, weights)
    return mixed(question, weights, routing.mix or "losses")


def mt_bert(question: Question, routing: Routing) -> Routed:
    """1 / (1 + CE(label, teacher)): MT-BERT's weights, which do not sum to 1. A row without
    a label has weight 1 for every teacher."""
    return mixed(question, 1.0 / (1.0 + _label_errors(question)), routing.mix or "losses")


POLICIES: dict[str, Policy] = {
    "average": average,
    "best": best,
    "random": random,
    "expertise": expertise,
    "calibrated": calibrated,
    "posterior": posterior,
    "gate": gate,
    "ca-mkd": ca_mkd,
    "mt-bert": mt_bert,
}


def _fitted(question: Question) -> Fitted:
    assert question.fitted is not None, "the policy needs what an expertise phase fits"
    return question.fitted


def _alike(question: Question) -> torch.Tensor:
    """The same weight for all teachers: float32 [T, n]."""
    count = len(question.logits)
    return question.labels.new_full((count, len(question.labels)), 1, dtype=torch.float32) / count


def _followed(question: Question, target: torch.Tensor) -> torch.Tensor:
    """How much each teacher is behind a target that is no mixture: its calibrated probability
    of the target's class, as a share of all teachers': float32 [T, n]."""
    temperatures = _fitted(question).temperatures
    choice = target.argmax(dim=-1, keepdim=True)
    behind = [
        log_probabilities(scores.float(), temperatures[name]).gather(1, choice)[:, 0]
        for name, scores in question.logits.items()
    ]
    return torch.softmax(torch.stack(behind), dim=0)


def _confidence(question: Question) -> torch.Tensor:
    """Largest calibrated probability of each teacher: float32 [T, n]."""
    temperatures = _fitted(question).temperatures
    return torch.stack(
        [
            torch.softmax(scores.float() / temperatures[name], dim=-1).amax(dim=-1)
            for name, scores in question.logits.items()
        ]
    )


def _label_errors(question: Question) -> torch.Tensor:
    """Cross-entropy of each teacher with the label: float32 [T, n], 0 on unlabelled rows.

    Finite also where a teacher has the logit -inf for the label.
    """
    errors = [
        F.cross_entropy(scores.float(), question.labels, reduction="none")
        for scores in question.logits.values()
    ]
    return torch.stack(errors).clamp(max=1e30)


def _table_order(question: Question, what: str) -> list[int]:
    """The table's `ranking` or `experts` as numbers of the question's teachers."""
    table = _fitted(question).table
    position = {name: number for number, name in enumerate(question.logits)}
    return [position[table.teachers[t]] for t in getattr(table, what)]


def _one_hot(choice: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([choice == teacher for teacher in range(count)]).float()
