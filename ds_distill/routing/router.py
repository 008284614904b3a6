"""From teachers' signals to a target, by a recipe's policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ds_distill.parts.policies import POLICIES, Routing
from ds_distill.routing.fitted import STATES, Fitted, states_of
from ds_distill.routing.policies import Policy, PolicyInputs, Target
from ds_distill.types import Batch, Signals


class Router:
    """A policy with what it needs: callable on a batch."""

    def __init__(
        self,
        routing: Routing,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        fitted: Fitted | None = None,
    ) -> None:
        """
        temperature: of the KL term; probabilities are mixed at it.
        fitted: for the policies that need it (`needs.expertise` of their entry).
        """
        self._entry = POLICIES[routing.policy]
        self._policy: Policy = self._entry.load()
        self._routing = routing
        self._temperature = temperature
        self._seed = seed
        self._fitted = fitted

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states it reads, of every teacher."""
        needs, fitted = self._entry.needs, self._fitted
        reads = needs.fitted_states and fitted is not None and fitted.gate.reads_states
        return (STATES,) if reads else ()

    @torch.no_grad()
    def __call__(self, teachers: Mapping[str, Signals], batch: Batch) -> Target:
        """The target of each row of the batch."""
        if self._fitted is not None and self._fitted.prior.device != batch.labels.device:
            self._fitted = self._fitted.to(batch.labels.device)
        inputs = PolicyInputs(
            {name: signals.logits for name, signals in teachers.items()},
            batch.labels,
            batch.keys,
            states_of(teachers) if self.layers else {},
            self._fitted,
            self._temperature,
            self._seed,
            batch.epoch,
        )
        return self._policy(inputs, self._routing)
