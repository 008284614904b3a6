"""The figure of docs/studies/doktra.md: how sure models are, and how often they are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from papers_markdown import RESULTS, page_of

from ds_distill.evaluation.predictions import RELIABILITY_BINS
from ds_distill.files import new_file, read_json

FIGURE = page_of("doktra").with_name("doktra-reliability.svg")
CURVES = {
    "teacher, with the penalty": ("calibrated", "biobert"),
    "teacher, without": ("not-calibrated", "biobert"),
    "student, with the penalty": ("calibrated", "student"),
    "student, without in its last tenth": ("calibrated", "no-penalty"),
    "student, labels only": ("calibrated", "labels-only"),
}
"""Variant and model of a table of DoKTra."""


def pooled(of_seeds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Bins of confidence of several seeds as one; as `evaluation.scores.reliability` makes them."""
    bins: dict[int, list[dict[str, Any]]] = {}
    for one in of_seeds:
        for found in one:
            number = min(int(found["confidence"] * RELIABILITY_BINS), RELIABILITY_BINS - 1)
            bins.setdefault(number, []).append(found)
    together = []
    for _, same in sorted(bins.items()):
        count = sum(found["count"] for found in same)
        means = {
            key: sum(found[key] * found["count"] for found in same) / count
            for key in ("confidence", "accuracy")
        }
        together.append({**means, "count": count})
    return together


def draw(names: list[str], path: Path = FIGURE) -> None:
    """A panel for each table of `names` that is there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "papers"
    tables = {name: read_json(RESULTS / f"{name}.json") for name in names}
    figure, axes = pyplot.subplots(
        1, len(tables), figsize=(5 * len(tables), 4.6), squeeze=False, layout="constrained"
    )
    for axis, (name, table) in zip(axes[0], tables.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for label, (variant, model) in CURVES.items():
            found = table["variants"].get(variant, {"models": {}})["models"].get(model)
            if found is not None:
                bins = found["reliability"]
                sure, right = ([one[key] for one in bins] for key in ("confidence", "accuracy"))
                [line] = axis.plot(sure, right, linewidth=1, label=label)
                sizes = [400 * one["count"] / sum(each["count"] for each in bins) for one in bins]
                axis.scatter(sure, right, sizes, color=line.get_color(), alpha=0.6)
        lowest = 0.45 if name == "doktra-gad" else 0.2
        axis.set(title=name, xlabel="confidence", xlim=(lowest, 1), ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel("share that is right")
    with new_file(path) as aside:
        figure.savefig(aside, format="svg", metadata={"Date": None})
    pyplot.close(figure)
