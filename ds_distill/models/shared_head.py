"""Teachers that are trained together, through one head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_distill.losses import Term
from ds_distill.losses.term import NamedModules
from ds_distill.models.bundle import Bundle, view_of
from ds_distill.models.configuration import CLASSIFIER_HEADS
from ds_distill.models.load import seeded
from ds_distill.types import Batch, Signals


class SharedHeadBundle(Bundle):
    """Several models in one engine, each on its own view of the batch, with one loss: the sum of
    theirs (MT-BERT's co-fine-tuning, Wu et al. 2021)."""

    def __init__(
        self, models: Mapping[str, PreTrainedModel], terms: Mapping[str, Mapping[str, Term]]
    ) -> None:
        """
        models: by name, after `share_head`. They run in this order on every rank.
        terms: by model, then by name; none of teachers.
        """
        super().__init__(None, {})
        self.bundles = NamedModules(
            {name: Bundle(model, {}, terms[name]) for name, model in models.items()}
        )

    @property
    def students(self) -> dict[str, PreTrainedModel]:
        return {
            name: cast(PreTrainedModel, bundle.student) for name, bundle in self.bundles.items()
        }

    @property
    def trained(self) -> list[nn.Module]:
        return [self.bundles]

    def readers(self) -> dict[nn.Parameter, list[Term]]:
        found: dict[nn.Parameter, list[Term]] = {}
        for bundle in self.bundles.values():
            for weight, terms in cast(Bundle, bundle).readers().items():
                found.setdefault(weight, []).extend(terms)
        return found

    def forward(
        self,
        batch: Batch | list[Batch],
        predict: tuple[str, ...] | None = None,
        layers: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """See `Bundle.forward`. The losses are `loss` and of each model `MODEL/TERM`; `predict` has
        names of models."""
        assert isinstance(batch, Batch), "it has no teachers"
        if predict is not None:
            found: dict[str, Signals] = {}
            for name in predict:
                one = self.bundles[name](_own(batch, name), ("student",), layers)
                found[name] = one["student"]
            return found
        losses: list[torch.Tensor] = []
        parts: dict[str, torch.Tensor] = {}
        for name, bundle in self.bundles.items():
            of_model = bundle(_own(batch, name))
            losses.append(of_model.pop("loss"))
            parts |= {f"{name}/{what}": value for what, value in of_model.items()}
        return {"loss": torch.stack(losses).sum(), **parts}


def _own(batch: Batch, name: str) -> Batch:
    """A batch as the only model of a bundle reads it."""
    return replace(batch, views={"student": view_of(name, batch)})


def share_head(models: Mapping[str, PreTrainedModel], seed: int) -> None:
    """Give sequence classifiers of one width one pooling layer [H, H] and one prediction layer
    [C, H], in place: the same parameters in all of them.

    The weights are drawn anew, normal with the first model's `initializer_range`, and biases are 0,
    as transformers starts a head: the layers of any one of them would fit that one alone.
    """
    first, *others = models.values()
    for layer in range(2):
        shared = _layer_of_head(first, layer)
        with torch.no_grad(), seeded(seed + layer):
            nn.init.normal_(shared.weight, std=first.config.initializer_range)
            nn.init.zeros_(shared.bias)
        for model in others:
            own = _layer_of_head(model, layer)
            assert own.weight.shape == shared.weight.shape, "`check` refuses unlike widths"
            own.weight, own.bias = shared.weight, shared.bias


def _layer_of_head(model: PreTrainedModel, number: int) -> nn.Linear:
    return cast(nn.Linear, model.get_submodule(CLASSIFIER_HEADS[model.config.model_type][number]))


def bundle_of(
    models: Mapping[str, PreTrainedModel], terms: Mapping[str, Mapping[str, Term]], seed: int
) -> Bundle:
    """What trains models without teachers: several through one head, which follows from the
    seed."""
    if len(models) > 1:
        share_head(models, seed)
        return SharedHeadBundle(models, terms)
    [(name, model)] = models.items()
    return Bundle(model, {}, terms[name])
