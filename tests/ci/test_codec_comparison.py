"""What the comparison of codecs measures, and the rivals it was measured against."""

import math

import torch
from codec_scores import compare_codecs
from dense_codec import DenseCodec
from topk_codec import TopKCodec


def make_logits(rows, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    frequent = -torch.log(torch.arange(1, vocabulary + 1).float())
    return frequent + 1.5 * torch.randn(rows, vocabulary, generator=generator)


def test_scores():
    batches = make_logits(40, 500, 1).split(15)
    codecs = {"exact": DenseCodec(500), "top 3": TopKCodec(500, 3), "top 30": TopKCodec(500, 30)}
    exact, few, many = compare_codecs(batches, codecs)
    assert [exact.name, few.name, many.name] == list(codecs)
    assert exact.rows == 40 and exact.bytes_per_row == 2000
    assert abs(exact.kl_mean) < 1e-6 < many.kl_mean < few.kl_mean < few.kl_p99
    assert min(exact.encode_rows_per_second, exact.decode_rows_per_second) > 0
    whole = torch.cat([codecs["top 3"].log_probs(codecs["top 3"].encode(b)) for b in batches])
    truth = torch.log_softmax(torch.cat(batches).double(), 1)
    expected = (truth.exp() * (truth - whole)).sum(1)
    assert math.isclose(few.kl_mean, expected.mean(), rel_tol=1e-4)
    assert math.isclose(few.kl_p99, expected.quantile(0.99), rel_tol=1e-4)
