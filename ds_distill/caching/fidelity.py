"""Fidelity of a cache: what it lost of the teachers' signals, measured on a few examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.cache.reader import CacheReader
from ds_distill.data.batches import Collator, Units, stored_rows
from ds_distill.engine.engine import Engine
from ds_distill.seen import two_classes
from ds_distill.types import LACKING

MUCH = 0.1
"""The lost share of a teacher's signals above which a build warns: chosen between the two shares
that were measured with students (docs/studies/codecs.md), 2% and 60%."""

_EXAMPLES = 32
_ROWS = 256
"""Rows processed at once: each is as long as a vocabulary."""


@dataclass(frozen=True)
class Repeated:
    """A teacher's logits of a few examples, run again, in another batch than the cache's."""

    keys: torch.Tensor
    """int64 [m, 2]: content keys of the examples."""
    logits: torch.Tensor
    """float32 [n, C]; LACKING where a row has fewer classes."""
    variant: int = 0
    """The mask variant."""


@dataclass(frozen=True)
class Fidelity:
    """How far a cache is from its teacher: batching, dtype and codec together."""

    rows: int
    """Number of compared rows: examples, masked tokens, or an example's labels, each for itself."""
    kl: float | None
    """KL(teacher || cache) in nats at the temperature of the cache, mean over rows. None of
    numbers."""
    lost: float
    """The lost share of what a student can learn: `kl` / (log C - the teachers' mean entropy), the
    KL that a uniform student has. Of numbers the mean squared difference / their variance."""

    def __str__(self) -> str:
        nats = "" if self.kl is None else f"KL(teacher || cache) {self.kl:.2g} nats, "
        return f"{nats}{self.lost:.1%} lost ({self.rows:,} rows)"


def repeat_inference(
    engine: Engine,
    teacher: str,
    examples: Units,
    collate: Collator,
    indices: np.ndarray,
    mask_variants: int | None,
) -> Repeated:
    """Run a teacher again on a few of `indices`. Every rank must call this with equal arguments.

    mask_variants: the last variant is used, because a codec is fitted to the first.
    """
    some = indices[np.unique(np.linspace(0, len(indices) - 1, _EXAMPLES).astype(np.int64))]
    variant = (mask_variants or 1) - 1
    batch = collate(some, variant)
    logits = engine.predict(batch, [teacher])[teacher].logits.float().cpu()[stored_rows(batch)]
    return Repeated(examples.keys[torch.from_numpy(some)], logits, variant)


def fidelity(
    repeated: Repeated, reader: CacheReader, teacher: str, *, many_labels: bool = False
) -> Fidelity | None:
    """Compare with the cached signals of the same examples. None where no token is masked.

    many_labels: logits are those of labels that an example may have; each is a row of two classes.
    """
    own, indices = repeated.logits, reader.indices(repeated.keys)
    if not len(own):
        return None
    if many_labels:
        own = two_classes(own).flatten(0, 1)
        logits = two_classes(reader.read(teacher, indices).logits).flatten(0, 1)
        stored = torch.log_softmax(logits, 1)
    elif own.shape[1] == 1:  # as a distribution it would be 1 whatever the cache holds
        off, variance = own - reader.read(teacher, indices).logits, own.double().var(correction=0)
        lost = off.double().square().mean() / variance if variance > 0 else 0.0
        return Fidelity(len(own), None, float(lost))
    else:
        stored = reader.log_probs(teacher, indices, repeated.variant)
    temperature = reader.manifest.teachers[teacher].signals.temperature or 1.0
    own = F.pad(own, (0, stored.shape[1] - own.shape[1]), value=LACKING)
    kl = learnable = 0.0
    for some, cached in zip(own.split(_ROWS), stored.split(_ROWS), strict=True):
        truth = torch.log_softmax(some / temperature, 1)
        # Rounding can make the KL of equals negative.
        kl += float(divergence(truth, cached).clamp(min=0.0).sum())
        uniform = (some != LACKING).sum(1).double().log()
        learnable += float((uniform - torch.special.entr(truth.exp()).sum(1)).sum())
    return Fidelity(len(own), kl / len(own), kl / learnable if learnable > 0 else 0.0)


def divergence(truth: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """KL(truth || decoded) of each row: log-probs float32 [n, V] -> float64 [n]."""
    terms = torch.exp(truth) * (truth - decoded)
    # What the truth excludes counts nothing, however it was decoded.
    return terms.masked_fill_(torch.isneginf(truth), 0.0).sum(1, dtype=torch.float64)
