"""Distributions over a vocabulary, as they are before their logits are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import nn


@dataclass(frozen=True)
class VocabularyHead:
    """The last step of a masked-LM, not yet computed: logits = features @ weight.T + bias.

    It holds modules, not weights: under ZeRO stage 3 a weight is only complete while it is read
    from its module in the engine's forward.
    """

    features: torch.Tensor
    """[n, D], float: the head's input at each row."""
    weight_of: nn.Module
    """Its `weight` is [V, D], often tied to the embeddings; [V, E] where there are more columns."""
    bias_of: nn.Module
    """Its `bias` is [V], or None."""
    columns_of: nn.Module | None = None
    """Its `weight`, [D - E, V], are the weight's other columns: MobileBERT's, whose embeddings are
    narrower than its states."""
    slots: list[torch.Tensor] = field(default_factory=list)
    """The weight's slot of `ds_kernels.linear_cross_entropy`, once that ran on some of the rows:
    what reads the head after it, at any rows, puts its gradient of the weight in there."""
    tokens: int | None = None
    """V, where the modules have more rows than there are tokens: padding to a multiple of 64, as of
    each ModernBERT, which is no word."""

    @property
    def entries(self) -> int:
        """V."""
        return self.tokens or len(cast(torch.Tensor, self.weight_of.weight))

    @property
    def weight(self) -> torch.Tensor:
        weight = cast(torch.Tensor, self.weight_of.weight)
        if self.columns_of is not None:
            weight = torch.cat([weight, cast(torch.Tensor, self.columns_of.weight).T], dim=1)
        return weight if self.tokens is None else weight[: self.tokens]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = cast(torch.Tensor | None, self.bias_of.bias)
        return bias if bias is None or self.tokens is None else bias[: self.tokens]

    def logits(self) -> torch.Tensor:
        """[n, V]: for a large V the largest tensor of a step."""
        return nn.functional.linear(self.features, self.weight, self.bias)


class EncodedLogits(Protocol):
    """Encoded distributions of a cache, decoded on the device where they are needed."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> torch.Tensor:
        """Decoded."""

    def moved(self, device: torch.device) -> EncodedLogits:
        """Still encoded; what is large as it is may stay until `to`."""

    def pin_memory(self) -> EncodedLogits: ...
