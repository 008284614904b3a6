"""Targets of policies on examples that they were not fitted on.

T teachers, N examples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ds_distill.errors import UserError
from ds_distill.process.activity import mark
from ds_distill.recipe.policies import (
    Routing,
    candidates,
)
from ds_distill.routing.calibration import log_probabilities
from ds_distill.routing.fitting import Fitted, fit, folds_of, states_of
from ds_distill.routing.gate import FOLDS
from ds_distill.routing.multi_label import TWO, fit_label, joined, of_label
from ds_distill.routing.partial_teachers import classes_of, knowing_average
from ds_distill.routing.policies import NOTHING, Asked, Policy
from ds_distill.seen import Target
from ds_distill.types import Batch, Signals

HELD_OUT = 1
"""Stream of the folds that policies are judged on; `fit` makes its own within the others."""


def held_out_targets(
    signals: Mapping[str, Signals],
    truth: np.ndarray,
    keys: torch.Tensor,
    labels: Sequence[str],
    *,
    seed: int = 0,
    group_keys: torch.Tensor | None = None,
    fit_on: Callable[..., Fitted] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Target]:
    """Each policy's target on every example, fitted on examples of other folds, by policy: logits
    float32 [N, C], also where losses are mixed; weights [T, N], or [T, N, C] of many labels.

    truth: as of `compare`, all labelled. fit_on: as `fit`, which is the default. advance: see
        `compare`.
    """
    group_keys = keys if group_keys is None else group_keys
    if truth.ndim > 1:
        how: dict[str, Any] = {"seed": seed, "group_keys": group_keys}
        how.update(fit_on=fit_label, advance=advance)
        of_labels = [
            held_out_targets(of_label(signals, number), truth[:, number], keys, TWO, **how)
            for number in range(len(labels))
        ]
        return {name: joined([of[name] for of in of_labels]) for name in candidates()}
    folds = folds_of(group_keys, seed, HELD_OUT)
    compared = candidates(partial=bool(classes_of(signals)), classes=len(labels))
    targets = {
        name: Target(torch.zeros(len(truth), len(labels)), torch.zeros(len(signals), len(truth)))
        for name in compared
    }
    for fold in range(FOLDS):
        mark("compares the policies")
        advance()
        out = folds == fold
        if not out.any():
            continue
        rest = at(signals, ~out)
        fitted = (fit_on or fit)(
            rest, truth[~out.numpy()], keys[~out], labels, seed=seed, group_keys=group_keys[~out]
        )
        held_out = at(signals, out)
        rows = Batch(keys[out], {}, torch.full((int(out.sum()),), -100), {})
        states = states_of(held_out)
        seen = Asked(NOTHING, rows, held_out, states=states, fitted=fitted, seed=seed)
        for name in compared:
            found = routed(seen, routing_of_candidate(name))
            together = _together(held_out, len(labels)) if found.logits is None else found.logits
            logits, weights = targets[name].logits, targets[name].weights
            assert logits is not None
            logits[out], weights[:, out] = together, found.weights
    return targets


def _together(signals: Mapping[str, Signals], count: int) -> torch.Tensor:
    """What stands for a target where teachers' losses are mixed, each over its classes: [n, C]."""
    log_probs = {name: log_probabilities(of.logits, 1.0) for name, of in signals.items()}
    return knowing_average(log_probs, classes_of(signals), count)


def routing_of_candidate(name: str) -> Routing:
    """The settings of a policy under one of the names by which policies are compared."""
    known = {**candidates(), **candidates(partial=True)}
    if name not in known:
        raise UserError(
            f"routing.json: no policy is called {name!r}. Known: {', '.join(known)}. Copy the run "
            "again."
        )
    return known[name].settings


def routed(seen: Asked, routing: Routing) -> Target:
    """A policy's target."""
    policy: Policy = routing.load()
    return policy(replace(seen, settings=routing))


def at(signals: Mapping[str, Signals], rows: torch.Tensor) -> dict[str, Signals]:
    """Signals at some rows: bool [N], or int64, their positions."""
    return {
        name: replace(
            outputs,
            output=outputs.logits[rows].float(),
            hidden={layer: state[rows] for layer, state in outputs.hidden.items()},
        )
        for name, outputs in signals.items()
    }
