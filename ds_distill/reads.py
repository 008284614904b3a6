"""What a model is asked for of a batch, and the inputs of attention that are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace

import torch

TOKENS = "tokens"
"""The row set of every real token of a masked-LM's texts, special ones too."""

TAUGHT = "taught"
"""The row set of the rows that count and of which a teacher says something, where there may be
others."""


@dataclass(frozen=True)
class Reads:
    """What a model is asked for: nothing else that it computes is kept.

    Layers are numbered as in transformers' `hidden_states`: 0 is the embeddings, -1 the last layer.
    """

    states: Collection[int] = frozenset()
    """Layers whose hidden states are wanted, at each row."""
    queries: Collection[int] = frozenset()
    """Layers whose attention's queries are wanted, of every token."""
    keys: Collection[int] = frozenset()
    values: Collection[int] = frozenset()
    logits: bool = True
    """Whether its head runs."""

    def __post_init__(self) -> None:
        for name in _LAYERS:
            object.__setattr__(self, name, frozenset(getattr(self, name)))

    @property
    def attention(self) -> frozenset[int]:
        """Layers of which an input of attention is wanted."""
        return frozenset().union(self.queries, self.keys, self.values)

    @property
    def parts(self) -> int:
        """How many tensors of all tokens are wanted of attention."""
        return len(self.queries) + len(self.keys) + len(self.values)

    def numbers(self, rows: int, tokens: int) -> int:
        """How many states' worth of numbers these are, of so many rows and tokens."""
        return len(self.states) * rows + self.parts * tokens

    def most_bytes(self, width: int, rows: int, tokens: int) -> int:
        """In fp32, of a model of that width, with an output as wide as a state."""
        return 4 * width * (rows + self.numbers(rows, tokens))

    @staticmethod
    def union(of: Iterable[Reads]) -> Reads:
        """All that is asked for in one of them."""
        each = list(of)
        layers = {name: frozenset().union(*(getattr(r, name) for r in each)) for name in _LAYERS}
        return Reads(**layers, logits=any(one.logits for one in each))


_LAYERS = tuple(field.name for field in fields(Reads) if field.name != "logits")


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What one layer's attention computes with, of B examples of S tokens and A heads of width D;
    None what was not asked for."""

    queries: torch.Tensor | None
    """float [B, A, S, D]."""
    keys: torch.Tensor | None
    values: torch.Tensor | None
    scale: float
    """Factor of the scores: queries times keys."""
    mask: torch.Tensor
    """bool [B, S]: the real tokens."""

    def of_examples(self, start: int, end: int, length: int) -> AttentionInputs:
        """Those of some examples, in their first `length` positions."""

        def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[start:end, :, :length]

        return replace(
            self,
            queries=part(self.queries),
            keys=part(self.keys),
            values=part(self.values),
            mask=self.mask[start:end, :length],
        )
