"""Routing policies: one function type, from what the teachers say to a target.

T teachers, n rows, C classes. A policy is pure: what is random in it is a function of (seed,
epoch, example key). To add one, write the function, add it to POLICIES and to the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import xxhash

from ds_distill.data.keys import uniform
from ds_distill.recipe.phases import Routing
from ds_distill.routing.expertise import ExpertiseTable

TEACHER_CHOICE = 101
"""Purpose of the random policy's numbers."""


@dataclass(frozen=True)
class Question:
    """What a policy may look at."""

    logits: dict[str, torch.Tensor]
    """[n, C] by teacher."""
    labels: torch.Tensor
    """int64 [n], -100 where unknown."""
    keys: torch.Tensor
    """int64 [n, 2]."""
    seed: int
    epoch: int
    table: ExpertiseTable | None


@dataclass(frozen=True)
class Routed:
    """A policy's answer."""

    logits: torch.Tensor | None
    """float32 [n, C]: softmax(logits / T) is the target. None where losses are mixed instead:
    then the loss is the sum over teachers of weight * loss against that teacher."""
    weights: torch.Tensor
    """float32 [T, n]: how much each teacher is followed."""


Policy = Callable[[Question, Routing], torch.Tensor]
"""-> weights float32 [T, n], teachers in the question's order."""


def average(question: Question, routing: Routing) -> torch.Tensor:
    """All teachers alike (thesis 4.8)."""
    count = len(question.logits)
    return question.labels.new_full((count, len(question.labels)), 1, dtype=torch.float32) / count


def best(question: Question, routing: Routing) -> torch.Tensor:
    """The teacher that is most accurate overall, for every row."""
    choice = torch.full_like(question.labels, _table_order(question, "ranking")[0])
    return _one_hot(choice, len(question.logits))


def random(question: Question, routing: Routing) -> torch.Tensor:
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
    return _one_hot(draws.argmax(dim=0), len(question.logits))


def expertise(question: Question, routing: Routing) -> torch.Tensor:
    """The teacher that predicts a class it is the best at (thesis 4.6 and 4.7).

    Exactly one such expert: it. Several, or none: the most accurate teacher of all
    (`conflict: best-teacher`, sections 4.6.1 and 4.7), or the most accurate of those in
    conflict (`best-expert`, section 1.3), which with none is the most accurate of all again.
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
    return _one_hot(best_expert, len(question.logits))


def ca_mkd(question: Question, routing: Routing) -> torch.Tensor:
    """(1 - exp(CE_k) / sum_j exp(CE_j)) / (K - 1), CE_k of teacher k with the label: the
    confidence-aware weights of CA-MKD. A single teacher has weight 1; on a row without a
    label all teachers count alike."""
    count = len(question.logits)
    if count == 1:
        return average(question, routing)
    errors = _label_errors(question)
    weights = (1.0 - torch.softmax(errors, dim=0)) / (count - 1)
    return torch.where(question.labels >= 0, weights, 1.0 / count)


def mt_bert(question: Question, routing: Routing) -> torch.Tensor:
    """1 / (1 + CE(label, teacher)): MT-BERT's weights, which do not sum to 1. A row without
    a label has weight 1 for every teacher."""
    return 1.0 / (1.0 + _label_errors(question))


POLICIES: dict[str, Policy] = {
    "average": average,
    "best": best,
    "random": random,
    "expertise": expertise,
    "ca-mkd": ca_mkd,
    "mt-bert": mt_bert,
}


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
    assert question.table is not None, "the policy needs an expertise table"
    position = {name: number for number, name in enumerate(question.logits)}
    return [position[question.table.teachers[t]] for t in getattr(question.table, what)]


def _one_hot(choice: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([choice == teacher for teacher in range(count)]).float()
