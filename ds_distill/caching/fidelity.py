"""Fidelity of a cache: its difference from the teachers, measured on a few examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.cache.reader import CacheReader
from ds_distill.data.batches import Collator, Examples, stored_rows
from ds_distill.engine.engine import Engine
from ds_distill.routing.label_rows import two_classes
from ds_distill.types import LACKING

MUCH = 0.1
"""The lost share of a teacher's signals above which a build warns: chosen between the two shares
that were measured with students (docs/studies/codecs.md), 2% and 60%."""

_EXAMPLES = 32
_ROWS = 256
"""Rows processed at once: each is as long as a vocabulary."""


@dataclass(frozen=True)
class Repeated:
    """A teacher's logits of a few examples, run again in two other batchings than the cache's."""

    keys: torch.Tensor
    """int64 [m, 2]: content keys of the examples."""
    together: torch.Tensor
    """float32 [n, C]: logits, all examples in one batch, long and short; LACKING where a row has
    fewer classes."""
    alone: torch.Tensor
    """float32 [n, C]: the same rows, each example in its own batch."""
    variant: int = 0
    """The mask variant."""


@dataclass(frozen=True)
class Fidelity:
    """Distances between full distributions, at the temperature of the cache, with a codec's tail
    spread as the codec spreads it."""

    rows: int
    """Number of compared rows: examples, masked tokens, or an example's labels, each for itself."""
    temperature: float
    batches: float
    """Largest total variation, in [0, 1], between the teacher's outputs in the two batchings: no
    cache can do better."""
    cached: float
    """Largest total variation between teacher and cache: batching, dtype and codec together."""
    cached_mean: float
    """The same, mean over rows."""
    kl_mean: float
    """KL(teacher || cache) in nats, mean over rows."""
    kl_p99: float
    """The 99th percentile of the same KL over rows."""
    entropy: float
    """Entropy of the teacher's distributions in nats, mean over rows."""
    lost: float
    """`kl_mean` / (log C - entropy), C the classes of a row: the lost share of the KL that a
    uniform student has to the teacher, which is all that it can learn."""

    def __str__(self) -> str:
        return (
            f"in other batches its probabilities differ by at most {self.batches:.1e}, in the "
            f"cache by {self.cached:.1e} (mean {self.cached_mean:.1e}).\n"
            f"    KL(teacher || cache) {self.kl_mean:.2g} nats, 99th percentile {self.kl_p99:.2g}, "
            f"mean entropy {self.entropy:.3g} ({self.rows:,} rows, temperature "
            f"{self.temperature:g}): {self.lost:.1%} lost"
        )


@dataclass(frozen=True)
class NumberFidelity:
    """Distances between numbers, of a teacher with one output."""

    rows: int
    """Number of compared rows: examples."""
    batches: float
    """Largest difference between the teacher's outputs in the two batchings: no cache can do
    better."""
    cached: float
    """Largest difference between teacher and cache: batching and dtype together."""
    spread: float
    """Standard deviation of the teacher's outputs."""
    lost: float
    """Mean squared difference between teacher and cache / `spread`^2: the lost share of the squared
    error that a student which always predicts the mean has to the teacher."""

    def __str__(self) -> str:
        return (
            f"in other batches its numbers differ by at most {self.batches:.1e}, in the cache by "
            f"{self.cached:.1e}; their standard deviation is {self.spread:.3g} ({self.rows:,} "
            f"rows): {self.lost:.1%} lost"
        )


def repeat_inference(
    engine: Engine,
    teacher: str,
    examples: Examples,
    collate: Collator,
    indices: np.ndarray,
    mask_variants: int | None,
) -> Repeated:
    """Run a teacher again on a few of `indices`. Every rank must call this with equal arguments.

    mask_variants: the last variant is used, because a codec is fitted to the first.
    """
    some = indices[np.unique(np.linspace(0, len(indices) - 1, _EXAMPLES).astype(np.int64))]
    variant = (mask_variants or 1) - 1

    def predict(part: np.ndarray) -> torch.Tensor:
        batch = collate(part, variant)
        logits = engine.predict(batch, [teacher])[teacher].logits.float().cpu()
        return logits[stored_rows(batch)]

    together = predict(some)
    alone = [predict(some[at : at + 1]) for at in range(len(some))]
    parts = [_widened(logits, together.shape[1]) for logits in alone]
    return Repeated(examples.keys[torch.from_numpy(some)], together, torch.cat(parts), variant)


def _widened(logits: torch.Tensor, classes: int) -> torch.Tensor:
    """[n, fewer] to [n, C]."""
    return F.pad(logits, (0, classes - logits.shape[1]), value=LACKING)


def fidelity(
    repeated: Repeated, reader: CacheReader, teacher: str, *, many_labels: bool = False
) -> Fidelity | NumberFidelity | None:
    """Compare with the cached signals of the same examples. None where no token is masked.

    many_labels: logits are those of labels that an example may have; each is a row of two classes.
    """
    if not len(repeated.alone):
        return None
    indices = reader.indices(repeated.keys)
    if many_labels:
        stored = torch.log_softmax(_of_labels(reader.read(teacher, indices).logits), 1)
        alone, together = _of_labels(repeated.alone), _of_labels(repeated.together)
        repeated = replace(repeated, alone=alone, together=together)
    elif repeated.alone.shape[1] == 1:  # as a distribution it would be 1 whatever the cache holds
        return _of_numbers(repeated, reader, teacher)
    else:
        stored = reader.log_probs(teacher, indices, repeated.variant)
    temperature = reader.manifest.teachers[teacher].signals.temperature or 1.0
    ours = [_widened(logits, stored.shape[1]) for logits in (repeated.alone, repeated.together)]
    parts, uniform = [], (ours[0] != LACKING).sum(1).double().log().mean()
    for alone, together, cached in zip(
        *(logits.split(_ROWS) for logits in (*ours, stored)), strict=True
    ):
        own = torch.log_softmax(alone / temperature, 1)
        batches = _total_variation(own, torch.log_softmax(together / temperature, 1))
        entropy = torch.special.entr(own.exp()).sum(1)
        kl = divergence(own, cached).clamp(min=0.0)  # rounding can make the KL of equals negative
        distances = batches, _total_variation(own, cached), kl, entropy
        parts.append(torch.stack([part.double() for part in distances]))
    batches, variation, kl, entropy = torch.cat(parts, dim=1)
    learnable = float(uniform - entropy.mean())
    return Fidelity(
        rows=len(kl),
        temperature=temperature,
        batches=float(batches.max()),
        cached=float(variation.max()),
        cached_mean=float(variation.mean()),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl.numpy(), 0.99)),
        entropy=float(entropy.mean()),
        lost=float(kl.mean()) / learnable if learnable > 0 else 0.0,
    )


def _of_labels(logits: torch.Tensor) -> torch.Tensor:
    """[n, L] -> [n * L, 2]; see `two_classes`."""
    return two_classes(logits).flatten(0, 1)


def _of_numbers(repeated: Repeated, reader: CacheReader, teacher: str) -> NumberFidelity:
    signals = reader.read(teacher, reader.indices(repeated.keys))
    own, stored = repeated.alone.double(), signals.logits.double()
    off = own - stored
    spread = float(own.std(correction=0))
    return NumberFidelity(
        rows=len(own),
        batches=float((own - repeated.together.double()).abs().max()),
        cached=float(off.abs().max()),
        spread=spread,
        lost=float(off.square().mean()) / spread**2 if spread > 0 else 0.0,
    )


def divergence(truth: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """KL(truth || decoded) of each row: log-probs float32 [n, V] -> float64 [n]."""
    terms = torch.exp(truth) * (truth - decoded)
    # What the truth excludes counts nothing, however it was decoded.
    return terms.masked_fill_(torch.isneginf(truth), 0.0).sum(1, dtype=torch.float64)


def _total_variation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Log-probs [n, C] each -> [n]."""
    return (one.exp() - other.exp()).abs().sum(1) / 2
