"""All policies on one labelled split, before a student is trained: which target is right?

Whatever a policy learns from the split is learnt from other examples than it is judged on
(cross-validation), so that a policy with many parameters has no advantage here that it would
not have on new text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from ds_distill.evaluation.metrics import paired_interval
from ds_distill.parts.policies import BASELINE, POLICIES, Routing, candidates
from ds_distill.routing.fitted import fit, folds_of, states_of
from ds_distill.routing.gate import FOLDS
from ds_distill.routing.policies import Policy, PolicyInputs, Target
from ds_distill.types import Signals

HELD_OUT = 1
"""Stream of the folds that policies are judged on; `fit` makes its own within the others."""


@dataclass(frozen=True)
class Score:
    """How often a target's largest class is the label."""

    accuracy: float
    per_class: dict[str, float | None]
    """None where the split has no example of the class."""
    difference: float
    """Of the accuracy to the average's."""
    interval: tuple[float, float]
    """95% bootstrap interval of the difference, over the same examples, or over the groups by which
    they are assigned to folds."""


@dataclass(frozen=True)
class Comparison:
    """Policies, teachers and what they have in common, on one split."""

    examples: int
    policies: dict[str, Score]
    teachers: dict[str, Score]
    any_teacher: Score
    """Right where any teacher is: no choice among teachers can do better."""
    agreement: dict[str, float]
    """`one, other` -> share of examples on which two teachers predict the same class."""
    choice: str
    """The policy with the best target, unless the interval of its difference to the average
    holds 0: then the average."""

    @property
    def routing(self) -> Routing:
        """The choice as a recipe would write it."""
        return routing_of_candidate(self.choice)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    signals: Mapping[str, Signals],
    truth: np.ndarray,
    keys: torch.Tensor,
    labels: Sequence[str],
    *,
    seed: int = 0,
    group_keys: torch.Tensor | None = None,
) -> Comparison:
    """
    signals: by teacher, logits [N, C] and, for a gate that reads them, the last layer's states
        [N, H]. truth: int [N] class ids, -1 unlabelled (left out). keys: int64 [N, 2].
    group_keys: int64 [N, 2], by which examples are assigned to folds; the keys, where None.
    """
    known = torch.from_numpy(truth >= 0)
    group_keys = (keys if group_keys is None else group_keys)[known]
    signals, keys, truth = at(signals, known), keys[known], truth[truth >= 0]
    outputs = {name: signals.logits.argmax(dim=1).numpy() for name, signals in signals.items()}
    routed = held_out_targets(signals, truth, keys, labels, seed=seed, group_keys=group_keys)
    right = {name: target.argmax(dim=1).numpy() == truth for name, target in routed.items()}
    groups = numbered(group_keys)

    def score(these: np.ndarray) -> Score:
        return Score(
            float(these.mean()),
            {
                label: float(these[truth == index].mean()) if (truth == index).any() else None
                for index, label in enumerate(labels)
            },
            float(these.mean() - right[BASELINE].mean()),
            paired_interval(these, right[BASELINE], groups=groups, seed=seed),
        )

    policies = {name: score(these) for name, these in right.items()}
    return Comparison(
        examples=len(truth),
        policies=policies,
        teachers={name: score(predicted == truth) for name, predicted in outputs.items()},
        any_teacher=score(np.any([predicted == truth for predicted in outputs.values()], axis=0)),
        agreement={
            f"{one}, {other}": float((outputs[one] == outputs[other]).mean())
            for one, other in combinations(outputs, 2)
        },
        choice=choose(policies),
    )


def choose(policies: Mapping[str, Score]) -> str:
    """The most accurate policy, of equals the first; the average if that is not better than it
    beyond chance."""
    best = max(policies, key=lambda name: policies[name].accuracy)
    return best if policies[best].interval[0] > 0 else BASELINE


def held_out_targets(
    signals: Mapping[str, Signals],
    truth: np.ndarray,
    keys: torch.Tensor,
    labels: Sequence[str],
    *,
    seed: int = 0,
    group_keys: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Each policy's target logits on every example, fitted on examples of other folds:
    float32 [N, C] by policy."""
    group_keys = keys if group_keys is None else group_keys
    folds = folds_of(group_keys, seed, HELD_OUT)
    targets = {name: torch.zeros(len(truth), len(labels)) for name in candidates()}
    for fold in range(FOLDS):
        out = folds == fold
        if not out.any():
            continue
        rest = at(signals, ~out)
        fitted = fit(
            rest, truth[~out.numpy()], keys[~out], labels, seed=seed, group_keys=group_keys[~out]
        )
        held_out = at(signals, out)
        inputs = PolicyInputs(
            logits={name: signals.logits for name, signals in held_out.items()},
            labels=torch.full((int(out.sum()),), -100),
            keys=keys[out],
            states=states_of(held_out),
            fitted=fitted,
            seed=seed,
        )
        for name, candidate in candidates().items():
            target = routed(inputs, routing_of_candidate(name)).logits
            assert target is not None, f"candidate {candidate.name} mixes losses"
            targets[name][out] = target
    return targets


def routing_of_candidate(name: str) -> Routing:
    """The settings of a policy under one of the names by which policies are compared."""
    settings = candidates()[name].settings
    assert isinstance(settings, Routing)
    return settings


def routed(inputs: PolicyInputs, routing: Routing) -> Target:
    """A policy's target."""
    policy: Policy = POLICIES[routing.policy].load()
    return policy(inputs, routing)


def numbered(group_keys: torch.Tensor) -> np.ndarray:
    """int64 [N, 2] -> int64 [N]: the same number where the rows are the same."""
    return np.unique(group_keys.numpy(), axis=0, return_inverse=True)[1].reshape(-1)


def at(signals: Mapping[str, Signals], rows: torch.Tensor) -> dict[str, Signals]:
    """Signals at some rows: bool [N], or int64, their positions."""
    return {
        name: Signals(
            outputs.logits[rows].float(),
            {layer: state[rows] for layer, state in outputs.hidden.items()},
        )
        for name, outputs in signals.items()
    }
