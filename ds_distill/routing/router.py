"""From teachers' signals to a target, by a recipe's policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ds_distill.recipe.phases import Routing
from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.policies import POLICIES, Question, Routed
from ds_distill.types import Batch, Signals

_DEFAULT_MIX = {"ca-mkd": "losses", "mt-bert": "losses"}


class Router:
    """A policy with what it needs: callable on a batch."""

    def __init__(
        self,
        routing: Routing,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        table: ExpertiseTable | None = None,
    ) -> None:
        """
        temperature: of the KL term; probabilities are mixed at it.
        table: for the policies that need one (`routing.needs_expertise`).
        """
        self._policy = POLICIES[routing.policy]
        self._routing = routing
        self._mix = routing.mix or _DEFAULT_MIX.get(routing.policy, "logits")
        self._temperature = temperature
        self._seed = seed
        self._table = table

    @torch.no_grad()
    def __call__(self, teachers: Mapping[str, Signals], batch: Batch) -> Routed:
        """The target of each row of the batch."""
        logits = {name: signals.logits for name, signals in teachers.items()}
        question = Question(logits, batch.labels, batch.keys, self._seed, batch.epoch, self._table)
        weights = self._policy(question, self._routing)
        return Routed(self._mixed(list(logits.values()), weights), weights)

    def _mixed(self, logits: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor | None:
        if self._mix == "losses":
            return None
        # Summed one by one: a stack of [T, n, V] would not fit beside a large vocabulary.
        if self._mix == "logits":
            total = torch.zeros_like(logits[0], dtype=torch.float32)
            for weight, scores in zip(weights[:, :, None], logits, strict=True):
                # A logit may be -inf, and 0 * -inf is NaN.
                total += torch.where(weight > 0, weight * scores.float(), 0.0)
            return total
        # In logarithms, so that a probability too small for float32 has a finite logit.
        total = torch.full_like(logits[0], -torch.inf, dtype=torch.float32)
        for weight, scores in zip(weights[:, :, None], logits, strict=True):
            log_probs = torch.log_softmax(scores.float() / self._temperature, dim=-1)
            total = torch.logaddexp(total, weight.log() + log_probs)
        # Normalised, for weights that do not sum to 1.
        return self._temperature * torch.log_softmax(total, dim=-1)
