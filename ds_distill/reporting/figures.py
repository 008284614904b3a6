"""Figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_distill.cache.compare import CodecScore
from ds_distill.files import new_file


def plot_codecs(scores: Sequence[CodecScore], path: Path, title: str) -> None:
    """Bytes per token against KL, mean and 99th percentile; codecs of a family, by the first
    word of their names, are joined. The suffix of `path` is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families: dict[str, list[CodecScore]] = {}
    for score in sorted(scores, key=lambda score: score.bytes_per_row):
        families.setdefault(score.name.split()[0], []).append(score)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.5), sharex=True, layout="constrained")
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
    figure.suptitle(title)
    kind = path.suffix.removeprefix(".")
    with new_file(path) as aside:
        figure.savefig(aside, format=kind, metadata={"Date": None} if kind == "svg" else None)
    pyplot.close(figure)
