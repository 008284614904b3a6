"""From teachers' signals to a target, by a recipe's policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ds_distill.recipe.schema import Routing
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
        total = torch.zeros_like(logits[0], dtype=torch.float32)
        for weight, scores in zip(weights, logits, strict=True):
            scores = scores.float()
            if self._mix == "probabilities":
                scores = torch.softmax(scores / self._temperature, dim=-1)
            total += weight[:, None] * scores
        if self._mix == "logits":
            return total
        share = total.sum(dim=-1, keepdim=True)  # not 1 for weights that are not normalised
        return self._temperature * torch.log(total / share)
