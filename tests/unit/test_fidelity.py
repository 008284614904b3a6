"""How near a cache is to its teachers, against sums written out."""

import math

import pytest
import torch
from cache_files import make_keys, signals_of, write_cache

from ds_distill.cache.codecs import CompactCodec
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.caching.fidelity import Repeated, fidelity

T, V = 2.0, 40
COMPACT = CompactCodec(V, 1e-2).to_json()
KINDS = {
    "dense": SignalSchema(dtype="bfloat16", classes=V),
    "compact": SignalSchema(
        dtype="float16", classes=V, codec=COMPACT, temperature=T, mask_variants=2
    ),
    "labels": SignalSchema(dtype="float16", classes=V),
    "numbers": SignalSchema(dtype="float16", classes=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_is_a_share_of_what_can_be_learnt(kind, tmp_path):
    """Labels were taken for classes once, of which a shift of all logits is none."""
    schema, keys = KINDS[kind], make_keys(12)
    write_cache(tmp_path / "cache", keys, {"t": schema})
    reader = CacheReader(tmp_path / "cache")
    variant = 1 if schema.mask_variants else 0
    own = signals_of("t", schema, keys, variant).logits * 1.1 + 0.3
    again, many = Repeated(torch.from_numpy(keys), own, variant), kind == "labels"
    measured = fidelity(again, reader, "t", many_labels=many)
    assert measured.rows == len(own) * (V if many else 1)
    stored = reader.read("t", reader.indices(again.keys), variant).to("cpu").logits.double()
    own = own.double()
    if kind == "numbers":
        assert measured.kl is None
        wanted = float((own - stored).square().mean() / (own - own.mean()).square().mean())
        assert measured.lost == pytest.approx(wanted)
        return
    if many:
        p, q = (torch.stack([-x, x], -1).sigmoid().log().flatten(0, 1) for x in (own, stored))
    else:
        temperature = schema.temperature or 1.0
        p, q = (torch.log_softmax(x / temperature, 1) for x in (own, stored))
    kl = float((p.exp() * (p - q)).sum(1).mean())
    learnable = math.log(p.shape[1]) + float((p.exp() * p).sum(1).mean())
    assert measured.kl == pytest.approx(kl, rel=1e-3)
    assert measured.lost == pytest.approx(kl / learnable, rel=1e-3) and measured.lost > 1e-3


def test_without_a_masked_token_there_is_nothing_to_compare(tmp_path):
    keys = make_keys(12)
    write_cache(tmp_path / "cache", keys, {"t": KINDS["compact"]})
    again = Repeated(torch.from_numpy(keys), torch.zeros(0, V))
    assert fidelity(again, CacheReader(tmp_path / "cache"), "t") is None
