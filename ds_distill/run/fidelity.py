"""How near a cache is to its teachers: a few examples asked again."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ds_distill.cache.compare import divergence
from ds_distill.cache.reader import CacheReader
from ds_distill.data.batches import Collator, Examples
from ds_distill.engine.engine import Engine

MUCH = 0.1
"""The share of a teacher's words from which on their loss is warned of: a choice between the
shares that were measured on students (docs/codecs.md), 2% and 60%."""

_EXAMPLES = 32
_ROWS = 256
"""Worked on at once: each is as long as a vocabulary."""


@dataclass(frozen=True)
class Repeated:
    """What a teacher says about a few examples, in two other ways to batch them than the
    cache's own."""

    keys: torch.Tensor
    """int64 [m, 2], the examples' content keys."""
    together: torch.Tensor
    """float32 [n, C] logits, of all in one batch, long and short."""
    alone: torch.Tensor
    """The same rows, of each example in a batch of its own."""
    variant: int = 0
    """Of masks."""


@dataclass(frozen=True)
class Fidelity:
    """Distances of whole distributions, at the temperature of the cache: a codec's tail is spread
    as the codec spreads it."""

    rows: int
    """That are compared: examples, or hidden tokens."""
    temperature: float
    batches: float
    """Total variation, in [0, 1], between the teacher's own in two ways to batch, the largest of
    all rows: what no cache can be better than."""
    cached: float
    """Between the teacher's own and the cache's: batches, number format and codec together."""
    cached_mean: float
    """The same, mean over rows."""
    kl_mean: float
    """Nats: KL(the teacher's own || the cache's), mean over rows."""
    kl_p99: float
    """Nats: 99 rows of 100 are not farther off."""
    entropy: float
    """Nats: of the teacher's own, mean over rows."""
    lost: float
    """`kl_mean` over what the teacher says, log C less its entropy: the KL that a student has
    to it which knows nothing yet. So much of that KL a student cannot see."""

    def __str__(self) -> str:
        return (
            f"asked again in other batches its probabilities differ by at most {self.batches:.1e}, "
            f"the cache's by {self.cached:.1e} (mean {self.cached_mean:.1e}).\n"
            f"    KL(teacher || cache) {self.kl_mean:.2g} nats, 99th percentile {self.kl_p99:.2g}, "
            f"beside a mean entropy of {self.entropy:.3g} ({self.rows:,} rows, temperature "
            f"{self.temperature:g}): {self.lost:.1%} lost"
        )

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def repeat_inference(
    engine: Engine,
    teacher: str,
    examples: Examples,
    collate: Collator,
    indices: np.ndarray,
    mask_variants: int | None,
) -> Repeated:
    """Ask a teacher about a few of `indices`. Every rank must call this, and asks about the same.

    mask_variants: of masks; the last one is asked about, because a codec is fitted to the first.
    """
    some = indices[np.unique(np.linspace(0, len(indices) - 1, _EXAMPLES).astype(np.int64))]
    variant = (mask_variants or 1) - 1

    def predict(part: np.ndarray) -> torch.Tensor:
        batch = collate(part, variant)
        logits = engine.predict(batch, [teacher])[teacher].logits.float().cpu()
        return logits[batch.row_sets["all"]]

    alone = torch.cat([predict(some[at : at + 1]) for at in range(len(some))])
    return Repeated(examples.keys[torch.from_numpy(some)], predict(some), alone, variant)


def fidelity(again: Repeated, reader: CacheReader, teacher: str) -> Fidelity | None:
    """Compare with what the cache holds of the same examples; None where no token of theirs is
    hidden."""
    if not len(again.alone):
        return None
    held = reader.log_probs(teacher, reader.indices(again.keys), again.variant)
    temperature = reader.manifest.teachers[teacher].signals.temperature or 1.0
    parts = []
    for alone, together, cached in zip(
        *(whole.split(_ROWS) for whole in (again.alone, again.together, held)), strict=True
    ):
        own = torch.log_softmax(alone / temperature, 1)
        batches = _total_variation(own, torch.log_softmax(together / temperature, 1))
        entropy = torch.special.entr(own.exp()).sum(1)
        kl = divergence(own, cached).clamp(min=0.0)  # of equals it is rounded to either side
        distances = batches, _total_variation(own, cached), kl, entropy
        parts.append(torch.stack([part.double() for part in distances]))
    batches, variation, kl, entropy = torch.cat(parts, dim=1)
    outputs = math.log(held.shape[1]) - float(entropy.mean())
    return Fidelity(
        rows=len(kl),
        temperature=temperature,
        batches=float(batches.max()),
        cached=float(variation.max()),
        cached_mean=float(variation.mean()),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl.numpy(), 0.99)),
        entropy=float(entropy.mean()),
        lost=float(kl.mean()) / outputs if outputs > 0 else 0.0,
    )


def _total_variation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Log-probs [n, C] each -> [n]."""
    return (one.exp() - other.exp()).abs().sum(1) / 2
