"""The compact codec with one part changed at a time: bytes counted, not written.

Every variant has the bytes of the codec as it is, as near as its own knob allows, so that only
KL differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_distill.cache.codecs import CompactCodec, TailShape
from ds_distill.caching.fidelity import divergence

THRESHOLD = 2e-3
MOST = 255
HEADER = 4
POWERS = torch.arange(16) / 8
TAIL_BYTES = {"even": 0, "prior": 0, "power": 1, "4 directions": 4, "directions": 16}


@dataclass(frozen=True)
class Variant:
    name: str
    rule: str = "threshold"
    """Which entries a row keeps: those above a threshold, as many as every row does, those that
    it takes to leave a tail of some mass, or those that differ most from the tail's shape."""
    value_bits: tuple[int, int] = (4, 4)
    """Of the 8 likeliest entries, and of the others."""
    ids: str = "elias-fano"
    tail: str = "directions"


VARIANTS = (
    Variant("as it is"),
    Variant("even tail", tail="even"),
    Variant("prior without directions", tail="prior"),
    Variant("prior and 4 directions", tail="4 directions"),
    Variant("prior to a power that each row chooses", tail="power"),
    Variant("same number of entries in all rows", rule="count"),
    Variant("same tail mass in all rows", rule="mass"),
    Variant("entries that differ most from the prior", rule="excess"),
    Variant("values of 3 bits", value_bits=(3, 3)),
    Variant("values of 5 bits", value_bits=(5, 5)),
    Variant("values of 8 bits", value_bits=(8, 8)),
    Variant("values of 6 bits for 8 entries, 3 for the rest", value_bits=(6, 3)),
    Variant("ids of ceil(log2 V) bits", ids="packed"),
)


def ablation(batches: Sequence[Tensor], sample: Sequence[Tensor]) -> list[dict[str, float | str]]:
    """Bytes per token, mean KL and mean number of entries of each variant."""
    vocabulary = batches[0].shape[1]
    tail = TailShape.fit(sample, THRESHOLD)
    codec = CompactCodec(vocabulary, THRESHOLD, tail)
    budget = sum(codec.encode(b).num_bytes for b in batches) / sum(map(len, batches))
    rows: list[dict[str, float | str]] = []
    for variant in VARIANTS:
        knob = _knob(variant, batches, tail, budget)
        parts = [_apply(variant, logits, tail, knob) for logits in batches]
        sizes, kl, kept = (torch.cat([part[at] for part in parts]) for at in range(3))
        rows.append(
            {
                "variant": variant.name,
                "bytes_per_row": float(sizes.mean()),
                "entries": float(kept.mean()),
                "kl_mean": float(kl.mean()),
            }
        )
    return rows


def _knob(variant: Variant, batches: Sequence[Tensor], tail: TailShape, budget: float) -> float:
    """What the variant's rule takes to keep within the budget, by bisection."""
    low, high = (1.0, float(MOST)) if variant.rule == "count" else (math.log(1e-8), 0.0)
    more_is_larger = variant.rule == "count"
    scored = [_scores(variant, torch.log_softmax(b, 1), tail) for b in batches]
    for _ in range(30):
        knob = (low + high) / 2
        sizes = torch.cat(
            [
                _sizes(variant, _kept(variant, s, p, knob), b.shape[1])
                for (s, p, _), b in zip(scored, batches, strict=True)
            ]
        )
        if (float(sizes.mean()) > budget) == more_is_larger:
            high = knob
        else:
            low = knob
    return (low + high) / 2


def _scores(variant: Variant, truth: Tensor, tail: TailShape) -> tuple[Tensor, Tensor, Tensor]:
    """By what entries are chosen, falling, their log-probs and their ids: [n, MOST]."""
    score = truth
    if variant.rule == "excess":
        prior = torch.log_softmax(tail.log_prior, 0)
        score = torch.log((truth.exp() * (truth - prior).clamp(min=0)).clamp(min=1e-30))
    values, ids = score.topk(MOST, 1)
    return values, truth.gather(1, ids), ids


def _kept(variant: Variant, scores: Tensor, log_probs: Tensor, knob: float) -> Tensor:
    """bool [n, MOST]."""
    if variant.rule == "count":
        kept = torch.arange(MOST).expand(len(scores), -1) < round(knob)
    elif variant.rule == "mass":
        before = log_probs.exp().cumsum(1) - log_probs.exp()
        kept = 1 - before > math.exp(knob)
    else:
        kept = scores >= knob
    return kept | (torch.arange(MOST) == 0)


def _sizes(variant: Variant, kept: Tensor, vocabulary: int) -> Tensor:
    """Bytes of each row: float [n]."""
    k = kept.sum(1)
    if variant.ids == "packed":
        ids = k * (vocabulary - 1).bit_length()
    else:
        low = torch.log2(vocabulary / k).floor().long()
        ids = k * low + k + ((vocabulary - 1) >> low)
    first, others = variant.value_bits
    # Two widths need to know which entries are the first: both sets of ids are coded apart.
    apart = 0 if first == others else 16
    values = k.clamp(max=8) * first + (k - 8).clamp(min=0) * others + apart
    return HEADER + TAIL_BYTES[variant.tail] + ((ids + values) / 8).ceil()


def _apply(
    variant: Variant, logits: Tensor, tail: TailShape, knob: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes, KL and number of entries of each row: [n]."""
    truth = torch.log_softmax(logits, 1)
    scores, log_probs, ids = _scores(variant, truth, tail)
    kept = _kept(variant, scores, log_probs, knob)
    sizes = _sizes(variant, kept, logits.shape[1])

    largest = log_probs.masked_fill(~kept, -math.inf).amax(1, keepdim=True)
    below = (largest - log_probs).masked_fill(~kept, 0.0)
    first, others = variant.value_bits
    levels = torch.full((MOST,), 2.0**others - 1)
    levels[:8] = 2.0**first - 1
    step = below.amax(1, keepdim=True) / levels
    below = torch.where(step > 0, (below / step).round() * step, 0.0)

    columns = torch.where(kept, ids, ids[:, :1])
    rest = truth.scatter(1, columns, -math.inf)
    mass = torch.logsumexp(rest, 1, keepdim=True)
    entries = (-below).masked_fill(~kept, -math.inf)
    entries = torch.log_softmax(entries, 1) + torch.log(-torch.expm1(mass.clamp(max=-1e-7)))

    def decoded(shape: Tensor) -> Tensor:
        shape = shape.expand_as(truth).scatter(1, columns, -math.inf)
        whole = shape - torch.logsumexp(shape, 1, keepdim=True) + mass
        at, rank = kept.nonzero().T
        whole[at, ids[at, rank]] = entries[at, rank]
        return whole

    prior = tail.log_prior
    if variant.tail == "power":
        kl = torch.stack([divergence(truth, decoded(p * prior)) for p in POWERS]).amin(0)
    elif variant.tail.endswith("directions"):
        coordinates = tail.coordinates(truth, THRESHOLD).float()
        if variant.tail.startswith("4"):
            coordinates[:, 4:] = 0
        along = (coordinates * tail.scales) @ tail.directions.float().T
        kl = divergence(truth, decoded(prior + along))
    else:
        kl = divergence(truth, decoded(prior if variant.tail == "prior" else 0 * prior))
    return sizes, kl, kept.sum(1).double()
