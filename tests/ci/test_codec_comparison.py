"""What the comparison of codecs measures, and the rivals it was measured against."""

import math

import codec_rivals
import pytest
import torch
from codec_scores import COMPARED, CodecScore, candidates, codec_table, compare_codecs, plot_codecs
from dense_codec import DenseCodec

from ds_distill.cache.codecs import TopKCodec
from ds_distill.caching.fidelity import divergence


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


def test_no_rows_are_no_comparison():
    with pytest.raises(ValueError, match="no rows"):
        compare_codecs([], {"exact": DenseCodec(5)})


def test_divergence_counts_only_what_can_be():
    truth = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    decoded = torch.tensor([[0.25, 0.5, 0.25], [0.0, 1.0, 0.0]]).log()
    assert divergence(truth, decoded).tolist() == pytest.approx([0.5 * math.log(2), math.inf])


def test_candidates_get_better_as_they_grow(tmp_path):
    codecs = candidates([make_logits(200, 600, 2)])
    assert list(codecs) == [*COMPARED]
    scores = compare_codecs([make_logits(60, 600, 3)], codecs)
    for family in ("topk", "compact"):
        of_family = [score for score in scores if score.name.startswith(family)]
        sizes = [score.bytes_per_row for score in of_family]
        assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes) >= 4
        means = [score.kl_mean for score in of_family]
        assert means == sorted(means, reverse=True)
    lines = codec_table(scores).markdown().splitlines()
    assert len(lines) == 2 + len(codecs)
    printed = [float(line.split("|")[2]) for line in lines[2:]]
    assert printed == sorted(printed)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    scores = [CodecScore(f"topk {n}", 9, 3.0 * n, 1 / n, 2 / n, 1.0, 1.0) for n in (8, 16)]
    plot_codecs(scores, tmp_path / "plot.svg", "A teacher")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count("bytes per token") == 2 and "A teacher" in drawn


@pytest.mark.parametrize(
    ("vocabulary", "recommended", "budget", "top"),
    [(30_522, 296, 108, 124), (50_265, 312, 114, 128), (128_100, 328, 121, 132)],
)
def test_distillkit_takes_the_bytes_it_says(vocabulary, recommended, budget, top):
    codecs = codec_rivals.rivals(vocabulary)
    logits = make_logits(2, vocabulary, 0)
    for name, size in (("recommended", recommended), ("budget", budget), ("top-32", top)):
        for kind in ("distillkit", "distillkit+tail"):
            codec = codecs[f"{kind} {name}"]
            assert codec.width == size == codec.encode(logits).payload.shape[1]


def test_distillkit_gives_back_what_it_was_given():
    """With as many terms as places its fit is exact, and bfloat16 has 8 bits."""
    logits = make_logits(5, 300, 0)
    truth = torch.log_softmax(logits, 1)
    wanted, ids = truth.topk(8, 1)
    codec = codec_rivals.DistillKit(300, 8, 4, (0, 1, 2, 3))
    encoded = codec.encode(logits)
    decoded = codec.decode(encoded)
    assert torch.equal(decoded.ids, ids)
    assert torch.equal(decoded.log_probs[:, :4], wanted[:, :4].bfloat16().float())
    assert torch.allclose(decoded.log_probs[:, 4:], wanted[:, 4:], atol=1e-4)
    whole = codec.log_probs(encoded).exp()
    others = whole.scatter(1, ids, math.nan)
    spread = others[~others.isnan()].reshape(5, -1)
    assert torch.allclose(spread, (1 - decoded.log_probs.exp().sum(1))[:, None] / 292, rtol=1e-2)
