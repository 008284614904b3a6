"""Rows of which a teacher says nothing: each follows a policy among those that say something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ds_distill.routing.policies import Policy, PolicyInputs, Target, numbers_on
from ds_distill.types import Signals


def given_rows(teachers: Mapping[str, Signals]) -> torch.Tensor | None:
    """bool [T, n]: of which rows each teacher says something. None where all do of all."""
    if all(signals.given is None for signals in teachers.values()):
        return None
    of_all = [
        torch.ones(len(of), dtype=torch.bool, device=of.logits.device)
        if of.given is None
        else of.given
        for of in teachers.values()
    ]
    given = torch.stack(of_all)
    return None if bool(given.all()) else given


def among_given(policy: Policy, inputs: PolicyInputs, routing: Any, given: torch.Tensor) -> Target:
    """A policy's target where it is asked about each row with the teachers alone that say something
    of it. A row without any has weights of 0.

    given: bool [T, n].
    """
    names = list(inputs.logits)
    # Of many labels each has its own.
    weights = torch.zeros(*given.shape, *inputs.labels.shape[1:], device=given.device)
    logits: torch.Tensor | None = None
    # One call for all rows with the same teachers.
    powers = 2 ** torch.arange(len(names), device=given.device)
    which = (given * powers[:, None]).sum(dim=0)
    for number in which.unique().tolist():
        present = [at for at in range(len(names)) if number >> at & 1]
        if not present:
            continue
        rows = (which == number).nonzero()[:, 0]
        target = policy(_of(inputs, rows, [names[at] for at in present]), routing)
        weights[numbers_on(rows.device, *present)[:, None], rows] = target.weights.float()
        if target.logits is not None:
            if logits is None:
                logits = target.logits.new_zeros(len(which), target.logits.shape[1])
            logits[rows] = target.logits
    return Target(logits, weights)


def _of(inputs: PolicyInputs, rows: torch.Tensor, names: list[str]) -> PolicyInputs:
    """Of some rows and teachers."""
    ids = inputs.teacher_ids
    return replace(
        inputs,
        logits={name: inputs.logits[name][rows] for name in names},
        labels=inputs.labels[rows],
        keys=inputs.keys[rows],
        states={name: of[rows] for name, of in inputs.states.items() if name in names},
        teacher_ids=None if ids is None else ids[rows],
        classes={name: of for name, of in inputs.classes.items() if name in names},
    )
