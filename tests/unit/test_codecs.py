"""Codecs of distributions over vocabularies: the packed bytes, the mass."""

import json
import math

import numpy as np
import pytest
import torch
from dense_codec import DenseCodec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_distill.cache.codecs import (
    CompactCodec,
    TailShape,
    codec_from_json,
)
from ds_distill.errors import UserError

KINDS = ("normal", "peaked", "one-hot", "uniform", "ties", "holes", "huge")


def make_logits(kind, rows, vocabulary, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    if kind == "peaked":
        logits[torch.arange(rows), torch.arange(rows) % vocabulary] += 20
    elif kind == "one-hot":
        logits.fill_(-math.inf)
        logits[torch.arange(rows), torch.arange(rows) * 7 % vocabulary] = 1.0
    elif kind == "uniform":
        logits.fill_(3.0)
    elif kind == "ties":
        logits.round_()
    elif kind == "holes":
        logits[:, 1::2] = -math.inf
    elif kind == "huge":
        logits *= 1e4
    return logits


def a_tail(vocabulary):
    codes = torch.arange(vocabulary, dtype=torch.int64) * 255 // (vocabulary - 1)
    generator = torch.Generator().manual_seed(vocabulary)
    directions = torch.randint(-127, 128, (vocabulary, 2), generator=generator).to(torch.int8)
    return TailShape(codes.to(torch.uint8), 0.05, directions, torch.tensor([1e-4, 5e-5]))


def codecs_for(vocabulary, threshold=1e-3):
    return [
        CompactCodec(vocabulary, threshold),
        CompactCodec(vocabulary, threshold, a_tail(vocabulary)),
    ]


cases = st.tuples(
    st.one_of(st.integers(2, 300), st.sampled_from([4096, 4097, 30_522])),
    st.sampled_from([1e-6, 1e-4, 1e-3, 0.3]),
    st.sampled_from(KINDS),
    st.integers(0, 4),
    st.integers(0, 1000),
)


@given(cases)
@example((200_000, 1e-6, "uniform", 2, 0))
@example((65_537, 1e-3, "normal", 3, 0))
@example((2, 0.3, "one-hot", 3, 0))
@settings(max_examples=15)
def test_round_trip(case):
    vocabulary, threshold, kind, rows, seed = case
    logits = make_logits(kind, rows, vocabulary, seed)
    truth = torch.log_softmax(logits.double(), 1)
    for codec in codecs_for(vocabulary, threshold):
        encoded = codec.encode(logits)
        assert len(encoded) == rows
        top = codec_from_json(json.loads(json.dumps(codec.to_json()))).decode(encoded)
        assert_distribution(top, vocabulary)
        there = top.ids >= 0
        kept = truth.gather(1, top.ids.clamp(min=0))
        # A step's half, and what float16 and a float32 log-sum-exp leave of a logit.
        slack = 1.1
        slack += 2e-6 * float(logits[logits.isfinite()].abs().max()) if rows else 0
        assert ((top.log_probs - kept).abs()[there] <= slack).all()
        left_out = torch.ones_like(truth).scatter_(
            1, torch.where(there, top.ids, top.ids[:, :1]), 0.0
        )
        tail = (truth.exp() * left_out).sum(1)
        assert torch.allclose(top.tail_log_prob.exp().double(), tail, rtol=1e-2, atol=2e-5)
        whole = codec.log_probs(encoded)
        assert whole.shape == (rows, vocabulary)
        assert torch.allclose(whole.exp().sum(1), torch.ones(rows), atol=1e-4)
        row, column = there.nonzero().T
        assert torch.equal(whole[row, top.ids[row, column]], top.log_probs[row, column])


def assert_distribution(top, vocabulary):
    there = top.ids >= 0
    assert top.ids.dtype == torch.int64 and top.log_probs.dtype == torch.float32
    assert ((top.ids >= -1) & (top.ids < vocabulary)).all()
    for ids, kept in zip(top.ids, there, strict=True):
        assert len(ids[kept].unique()) == kept.sum() >= 1
    assert (top.log_probs[~there] == -math.inf).all()
    mass = top.log_probs.exp().sum(1) + top.tail_log_prob.exp()
    assert torch.allclose(mass, torch.ones(len(mass)), atol=1e-5)


# The formats, read slowly: a row is one long integer.


def bits_of(row):
    return int.from_bytes(bytes(row), "little")


def field(row, start, width):
    return bits_of(row) >> start & ((1 << width) - 1)


@pytest.mark.parametrize(
    "vocabulary",
    [2, 256, 30_522],
)
def test_compact_bytes(vocabulary):
    logits = make_logits("normal", 7, vocabulary) * 2
    codec = CompactCodec(vocabulary, 1e-3, a_tail(vocabulary))
    encoded = codec.encode(logits)
    top, whole = codec.decode(encoded), codec.log_probs(encoded)
    payload, start = encoded.payload.tolist(), 0
    log_probs = torch.log_softmax(logits, 1)
    codes, directions = codec.tail.codes.tolist(), codec.tail.directions.tolist()
    scales = codec.tail.scales.tolist()
    for number, length in enumerate(encoded.lengths.tolist()):
        row = payload[start : start + length]
        start += length
        k, step = row[0], row[1] / 128
        tail = float(np.frombuffer(bytes(row[2:4]), np.float16)[0])
        along = np.frombuffer(bytes(row[4:6]), np.int8).astype(int)
        start_bit = 8 * 6
        low = int(math.log2(vocabulary / k))
        values = [field(row, start_bit + 4 * j, 4) for j in range(k)]
        lows = [field(row, start_bit + 4 * k + low * j, low) for j in range(k)]
        highs = field(row, start_bit + (4 + low) * k, k + (vocabulary - 1 >> low))
        coordinates = [place for place in range(highs.bit_length()) if highs >> place & 1]
        ids = [(p - j << low) + lows[j] for j, p in enumerate(coordinates)]
        wanted = (log_probs[number] >= math.log(1e-3)).nonzero().squeeze(1).tolist()
        assert ids == wanted[:255] == top.ids[number, :k].tolist()
        assert length == math.ceil((start_bit + (4 + low) * k + k + (vocabulary - 1 >> low)) / 8)
        weights = [math.exp(-step * value) for value in values]
        expected = [w / sum(weights) * (1 - math.exp(tail)) for w in weights]
        assert np.allclose(top.log_probs[number, :k].exp(), expected, rtol=1e-4, atol=1e-7)
        shape = [
            -0.05 * code + sum(a * s * d for a, s, d in zip(along, scales, way, strict=True))
            for code, way in zip(codes, directions, strict=True)
        ]
        prior = np.exp(shape)
        prior[ids] = 0
        if prior.any():
            spread = prior / prior.sum() * math.exp(tail)
            others = np.setdiff1d(np.arange(vocabulary), ids)
            assert np.allclose(whole[number].exp()[others], spread[others], rtol=1e-3, atol=1e-9)
    assert start == len(payload)


def test_fitted_tail_is_closer_than_an_even_one():
    generator = torch.Generator().manual_seed(0)
    frequent = -2 * torch.log(torch.arange(1, 2001).float())
    logits = frequent + 0.3 * torch.randn(300, 2000, generator=generator)
    topics = torch.randn(3, 2000, generator=generator)  # that rows have more or less of
    logits += torch.randn(300, 3, generator=generator) @ topics
    truth = torch.log_softmax(logits[:100], 1)
    fitted = TailShape.fit(logits[100:].split(50), 2e-3)
    even = TailShape.even(2000)
    prior = TailShape(fitted.codes, fitted.step, even.directions, even.scales)
    divergence = []
    for tail in (None, prior, fitted):
        codec = CompactCodec(2000, 2e-3, tail)
        whole = codec.log_probs(codec.encode(logits[:100]))
        divergence.append(float((truth.exp() * (truth - whole)).sum(1).mean()))
    assert divergence[1] < 0.6 * divergence[0]
    assert divergence[2] < 0.5 * divergence[1]


# The same bytes for the same row.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_and_any_strides(dtype):
    logits = make_logits("ties", 40, 300).to(dtype)
    strided = torch.empty(300, 80, dtype=dtype).T[::2].copy_(logits)
    assert not strided.is_contiguous()
    for codec in codecs_for(300):
        encoded = codec.encode(logits.float())
        for same in (logits, strided, logits):
            assert torch.equal(codec.encode(same).payload, encoded.payload)


def test_a_row_does_not_depend_on_its_batch(monkeypatch):
    logits = make_logits("normal", 12, 300)
    for codec in codecs_for(300):
        whole = codec.encode(logits)
        monkeypatch.setattr("ds_distill.cache.codecs.base._CHUNK_ELEMENTS", {"cpu": 900})
        in_chunks = codec.encode(logits)
        monkeypatch.undo()
        alone = [codec.encode(row[None]).payload.flatten() for row in logits]
        assert torch.equal(whole.payload, in_chunks.payload)
        assert torch.equal(whole.payload.flatten(), torch.cat(alone))


# What a caller can do wrong.


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_refused(bad):
    logits = make_logits("normal", 5, 30)
    logits[3, 7] = bad
    for codec in [*codecs_for(30), DenseCodec(30)]:
        with pytest.raises(ValueError, match="first row 3"):
            codec.encode(logits)
        with pytest.raises(ValueError, match="row 0"):
            codec.encode(torch.full((1, 30), -math.inf))
        with pytest.raises(ValueError, match="vocabulary of 30"):
            codec.encode(logits[:, :29])


def test_a_codec_of_another_version_is_refused():
    with pytest.raises(UserError, match=r"codec 'topk'; this version has compact\. .* build it"):
        codec_from_json({"codec": "topk", "vocabulary": 10, "entries": 64})
