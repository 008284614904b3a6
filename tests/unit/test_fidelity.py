"""How near a cache is to its teachers, against sums written out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_files import make_keys, signals_of, write_cache

from ds_distill.cache.codecs import CompactCodec, TopKCodec
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.caching.fidelity import Fidelity, Repeated, fidelity
from ds_distill.types import Signals

T, V = 2.0, 40
PACKED = {"dtype": "float16", "classes": V, "temperature": T, "mask_variants": 2}
KINDS = {
    "dense": SignalSchema(dtype="bfloat16", classes=V),
    "topk": SignalSchema(codec=TopKCodec(V, 6).to_json(), **PACKED),
    "compact": SignalSchema(codec=CompactCodec(V, 1e-2).to_json(), **PACKED),
}


def decoded(schema: SignalSchema, outputs: Signals, row: int) -> list[float]:
    """The distribution of a stored row: a top's tail is spread evenly over all other entries."""
    if outputs.top is None:
        logits = outputs.logits[row].double() / (schema.temperature or 1.0)
        return torch.softmax(logits, 0).tolist()
    top = outputs.top
    kept = {
        int(number): math.exp(value)
        for number, value in zip(top.ids[row], top.log_probs[row], strict=True)
        if number >= 0
    }
    rest = math.exp(top.tail_log_prob[row]) / (V - len(kept))
    return [kept.get(number, rest) for number in range(V)]


@pytest.mark.parametrize("kind", KINDS)
def test_distances_are_those_of_whole_distributions(kind: str, tmp_path: Path) -> None:
    schema, keys = KINDS[kind], make_keys(12)
    write_cache(tmp_path / "cache", keys, {"t": schema})
    reader = CacheReader(tmp_path / "cache")
    variant = 1 if schema.mask_variants else 0
    own = signals_of("t", schema, keys, variant).logits
    near = torch.roll(own, 1, dims=1)
    measured = fidelity(Repeated(torch.from_numpy(keys), near, own, variant), reader, "t")
    assert measured is not None and measured.rows == len(own)

    temperature = schema.temperature or 1.0
    stored = reader.read("t", reader.indices(torch.from_numpy(keys)), variant).to(
        torch.device("cpu")
    )
    batches, cached, kl, entropy = [], [], [], []
    for row in range(len(own)):
        p, q = (torch.softmax(x[row].double() / temperature, 0).tolist() for x in (own, near))
        held = decoded(schema, stored, row)
        batches.append(sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2)
        cached.append(sum(abs(a - b) for a, b in zip(p, held, strict=True)) / 2)
        kl.append(sum(a * math.log(a / b) for a, b in zip(p, held, strict=True)))
        entropy.append(-sum(a * math.log(a) for a in p))
    close = {"rel": 1e-3, "abs": 1e-6}
    assert measured.batches == pytest.approx(max(batches), rel=1e-4) and max(batches) > 0.5
    assert measured.cached == pytest.approx(max(cached), **close)
    assert measured.cached_mean == pytest.approx(np.mean(cached), **close)
    assert measured.kl_mean == pytest.approx(np.mean(kl), **close)
    assert measured.kl_p99 == pytest.approx(np.quantile(kl, 0.99), **close)
    assert measured.entropy == pytest.approx(np.mean(entropy), rel=1e-4)
    outputs = math.log(V) - float(np.mean(entropy))
    assert measured.lost == pytest.approx(np.mean(kl) / outputs, **close)


def test_without_a_masked_token_there_is_nothing_to_compare(tmp_path: Path) -> None:
    schema, keys = KINDS["topk"], make_keys(12)
    write_cache(tmp_path / "cache", keys, {"t": schema})
    none = torch.zeros(0, V)
    again = Repeated(torch.from_numpy(keys), none, none)
    assert fidelity(again, CacheReader(tmp_path / "cache"), "t") is None


def test_each_label_of_several_is_a_row_of_its_own(tmp_path: Path) -> None:
    """They were taken for classes, of which a shift of all logits is none."""
    schema, keys = KINDS["dense"], make_keys(12)
    write_cache(tmp_path / "cache", keys, {"t": schema})
    reader = CacheReader(tmp_path / "cache")
    own = signals_of("t", schema, keys).logits
    again = Repeated(torch.from_numpy(keys), own - 4.0, own)
    measured = fidelity(again, reader, "t", many_labels=True)
    assert isinstance(measured, Fidelity) and measured.rows == 12 * V
    stored = reader.read("t", reader.indices(again.keys)).logits.double()
    shares = [(-x.double()).exp().add(1).reciprocal() for x in (own, own - 4.0, stored)]
    assert measured.batches == pytest.approx(float((shares[0] - shares[1]).abs().max()), rel=1e-4)
    p, q = shares[0], shares[2]
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    assert measured.kl_mean == pytest.approx(float(kl.mean()), rel=1e-2, abs=1e-7)
    assert measured.entropy == pytest.approx(float(entropy.mean()), rel=1e-4)
    assert measured.lost == pytest.approx(
        float(kl.mean() / (math.log(2) - entropy.mean())), rel=1e-2
    )
