"""How near a cache is to its teachers: a few examples asked again."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch

from ds_distill.cache.reader import CacheReader
from ds_distill.data.batches import Collator, Examples
from ds_distill.engine.engine import Engine
from ds_distill.types import Signals, TopK

_EXAMPLES = 32


@dataclass(frozen=True)
class Again:
    """What a teacher says about a few examples, in two other ways to batch them than the
    cache's own."""

    keys: torch.Tensor
    """int64 [m, 2], the examples' content keys."""
    together: torch.Tensor
    """float32 [n, C] logits, of all in one batch, long and short."""
    alone: torch.Tensor
    """The same rows, of each example in a batch of its own."""


@dataclass(frozen=True)
class Fidelity:
    """Total variation between distributions, in [0, 1]: the largest of all rows."""

    batches: float
    """Between the teacher's own in two ways to batch: what no cache can be better than."""
    cached: float
    """Between the teacher's own and the cache's: batches, number format and codec together."""
    cached_mean: float
    """The same, mean over rows."""

    def __str__(self) -> str:
        return (
            f"asked again in other batches its probabilities differ by at most {self.batches:.1e}, "
            f"the cache's by {self.cached:.1e} (mean {self.cached_mean:.1e})"
        )

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def ask_again(
    engine: Engine, teacher: str, examples: Examples, collate: Collator, indices: np.ndarray
) -> Again:
    """Ask a teacher about a few of `indices`, with their first mask draw. Every rank must call
    this, and asks about the same."""
    some = indices[np.unique(np.linspace(0, len(indices) - 1, _EXAMPLES).astype(np.int64))]

    def ask(part: np.ndarray) -> torch.Tensor:
        batch = collate(part)
        logits = engine.ask(batch, [teacher])[teacher].logits.float().cpu()
        return logits[batch.row_sets["all"]]

    alone = torch.cat([ask(some[at : at + 1]) for at in range(len(some))])
    return Again(examples.keys[torch.from_numpy(some)], ask(some), alone)


def fidelity(again: Again, reader: CacheReader, teacher: str) -> Fidelity:
    """Compare with what the cache holds of the same examples."""
    said = reader.read(teacher, reader.rows(again.keys)).to(torch.device("cpu"))
    temperature = reader.manifest.teachers[teacher].words.temperature or 1.0
    own = torch.softmax(again.alone / temperature, 1)
    batches = _total_variation(own, Signals(again.together), temperature)
    cached = _total_variation(own, said, temperature)
    return Fidelity(_largest(batches), _largest(cached), float(cached.sum() / max(len(cached), 1)))


def _total_variation(own: torch.Tensor, said: Signals, temperature: float) -> torch.Tensor:
    """[n]. What lies outside a top's entries counts as one class."""
    if said.top is None:
        return (own - torch.softmax(said.logits / temperature, 1)).abs().sum(1) / 2
    top: TopK = said.top
    there = top.ids >= 0
    entries = own.gather(1, top.ids.clamp(min=0)) * there
    other = top.log_probs.exp() * there
    tails = (1 - entries.sum(1) - top.tail_log_prob.exp()).abs()
    return ((entries - other).abs().sum(1) + tails) / 2


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if len(values) else 0.0
