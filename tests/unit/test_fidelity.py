"""How near a cache is to its teachers, against sums written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cache_files import make_keys, says, write_cache

from ds_distill.cache.codecs import CompactCodec, TopKCodec
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.words import Words
from ds_distill.phases.fidelity import Again, fidelity

T, V = 2.0, 40
PACKED = {"dtype": "float16", "classes": V, "temperature": T, "draws": 2}
KINDS = {
    "dense": Words(dtype="bfloat16", classes=V),
    "topk": Words(codec=TopKCodec(V, 6).to_json(), **PACKED),
    "compact": Words(codec=CompactCodec(V, 1e-2).to_json(), **PACKED),
}


def variation(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_largest_total_variation(kind: str, tmp_path: Path) -> None:
    words, keys = KINDS[kind], make_keys(12)
    write_cache(tmp_path / "cache", keys, {"t": words})
    reader = CacheReader(tmp_path / "cache")
    own = says("t", words, keys).logits
    near = torch.roll(own, 1, dims=1)
    measured = fidelity(Again(torch.from_numpy(keys), near, own), reader, "t")

    temperature = words.temperature or 1.0
    kept = reader.read("t", reader.rows(torch.from_numpy(keys))).to(torch.device("cpu"))
    batches, cached = [], []
    for row in range(len(own)):
        p, q = (torch.softmax(x[row].double() / temperature, 0).tolist() for x in (own, near))
        batches.append(variation(p, q))
        if kept.top is None:
            held = torch.softmax(kept.logits[row].double() / temperature, 0).tolist()
            cached.append(variation(p, held))
            continue
        there = [number for number in kept.top.ids[row].tolist() if number >= 0]
        entries = kept.top.log_probs[row].exp().tolist()[: len(there)]
        rest = 1 - sum(p[number] for number in there)
        tail = float(kept.top.tail_log_prob[row].exp())
        cached.append(variation([*(p[number] for number in there), rest], [*entries, tail]))
    assert measured.batches == pytest.approx(max(batches), rel=1e-4) and max(batches) > 0.5
    assert measured.cached == pytest.approx(max(cached), rel=1e-3, abs=1e-6)
    assert measured.cached_mean == pytest.approx(sum(cached) / len(cached), rel=1e-3, abs=1e-6)


def test_rows_of_other_examples_are_far(tmp_path: Path) -> None:
    words, keys = KINDS["dense"], make_keys(12)
    write_cache(tmp_path / "cache", keys, {"t": words})
    reader = CacheReader(tmp_path / "cache")
    own = says("t", words, keys).logits
    again = Again(torch.from_numpy(keys), own, own)
    assert fidelity(again, reader, "t").cached < 0.05
    assert fidelity(Again(again.keys.flip(0), own, own), reader, "t").cached > 0.5
