"""What codecs cost and what they lose, on the distributions of one's own teacher."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from topk_codec import TopKCodec
from torch import Tensor

from ds_distill.cache.codecs import CompactCodec, VocabularyCodec
from ds_distill.caching.fidelity import divergence
from ds_distill.reporting.figures import new_figure
from ds_distill.tables import Table


@dataclass(frozen=True)
class CodecScore:
    """One codec on n rows."""

    name: str
    rows: int
    bytes_per_row: float
    kl_mean: float
    """Nats: KL(true || decoded) over the whole vocabulary, the tail spread as the codec does."""
    kl_p99: float
    """Nats: 99 rows of 100 are not farther off."""
    encode_rows_per_second: float
    decode_rows_per_second: float
    """To whole distributions."""


THRESHOLDS, ENTRIES = (1e-2, 4e-3, 2e-3, 1e-3, 5e-4), (16, 32, 64, 128)


def candidates(sample: Sequence[Tensor]) -> dict[str, VocabularyCodec]:
    """Codecs worth comparing for a teacher, by name.

    sample: some batches of its logits, float [n, V], that codecs are fitted to; others than
    those that they are then compared on.
    """
    vocabulary = sample[0].shape[1]
    compact = {f"compact {least:g}": CompactCodec(vocabulary, least) for least in THRESHOLDS}
    return {
        **{name: codec.fit(sample) for name, codec in compact.items()},
        **{f"topk {entries}": TopKCodec(vocabulary, entries) for entries in ENTRIES},
    }


def compare_codecs(
    batches: Iterable[Tensor], codecs: Mapping[str, VocabularyCodec]
) -> list[CodecScore]:
    """Encode and decode all batches with each codec.

    batches: float [n, V] logits at the temperature of the cache, on any device. Every batch is
    in memory alone. Raises ValueError when there is none.
    """
    divergences: dict[str, list[Tensor]] = {name: [] for name in codecs}
    num_bytes = dict.fromkeys(codecs, 0)
    seconds = {name: [0.0, 0.0] for name in codecs}
    rows = 0
    for logits in batches:
        rows += len(logits)
        truth = torch.log_softmax(logits.float(), 1)
        for name, codec in codecs.items():
            begin = _now(logits.device)
            encoded = codec.encode(logits)
            encoded_at = _now(logits.device)
            decoded = codec.log_probs(encoded)
            seconds[name][0] += encoded_at - begin
            seconds[name][1] += _now(logits.device) - encoded_at
            num_bytes[name] += encoded.num_bytes
            divergences[name].append(divergence(truth, decoded).cpu())
    if not rows:
        raise ValueError("no rows to compare codecs on")
    scores = []
    for name in codecs:
        values = torch.cat(divergences[name])
        encoding, decoding = seconds[name]
        scores.append(
            CodecScore(
                name,
                rows,
                num_bytes[name] / rows,
                float(values.mean()),
                float(np.quantile(values.numpy(), 0.99)),
                rows / encoding,
                rows / decoding,
            )
        )
    return scores


def codec_table(scores: Sequence[CodecScore]) -> Table:
    """In the order of their size."""
    heads = ["codec", "bytes per token", "KL mean", "KL p99", "encode rows/s", "decode rows/s"]
    rows = [
        [
            score.name,
            f"{score.bytes_per_row:.1f}",
            f"{score.kl_mean:.4g}",
            f"{score.kl_p99:.4g}",
            f"{score.encode_rows_per_second:,.0f}",
            f"{score.decode_rows_per_second:,.0f}",
        ]
        for score in sorted(scores, key=lambda score: score.bytes_per_row)
    ]
    return Table("", heads, rows)


def plot_codecs(scores: Sequence[CodecScore], path: Path, title: str) -> None:
    """Bytes per token against KL, mean and 99th percentile; codecs of a family, by the first
    word of their names, are joined. The suffix of `path` is the format."""
    families: dict[str, list[CodecScore]] = {}
    for score in sorted(scores, key=lambda score: score.bytes_per_row):
        families.setdefault(score.name.split()[0], []).append(score)
    with new_figure(path, (10, 4.5), panels=2) as axes:
        for axis, what in zip(axes, ("kl_mean", "kl_p99"), strict=True):
            for family, members in families.items():
                sizes = [score.bytes_per_row for score in members]
                axis.plot(sizes, [getattr(s, what) for s in members], marker="o", label=family)
                for score in members:
                    axis.annotate(
                        score.name.partition(" ")[2],
                        (score.bytes_per_row, getattr(score, what)),
                        textcoords="offset points",
                        xytext=(4, 4),
                        fontsize=7,
                    )
            axis.set(xscale="log", yscale="log", xlabel="bytes per token")
            axis.grid(alpha=0.3, which="both")
        axes[0].set_ylabel("KL(true || decoded), nats: mean")
        axes[1].set_ylabel("99th percentile")
        axes[0].legend()
        axes[0].figure.suptitle(title)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
