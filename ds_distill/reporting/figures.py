"""Figures of a run."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.figure_files import new_figure, of_scores
from ds_distill.reporting.results import students_of


def plot_settings(found: dict[str, Any], metric: MetricClass, path: Path) -> None:
    """Scores of a sweep: a line for each student of each setting, the shipped one's in colour, with
    a dot for each seed and the mean with its interval, and a line where the baseline is. Of a
    student whose scores are undefined it says so.

    found: as `sweep.table.summary` makes it, with settings. metric: its.
    """
    rows = found["settings"]
    factor = 100 if metric.is_share() else 1
    lines = [
        (
            # In lines: a long setting would leave the scores no room.
            (fill(", ".join(row["setting"]), 40) or "the recipe's")
            + (f"\n{student}" if row["others"] else ""),
            numbers["score"],
            ("C0", "C1") if numbers is row else ("0.6", "0.4"),
        )
        for row in rows
        for student, numbers in students_of(row)
    ]
    height = 0.25 + 0.2 * (1 + max(name.count("\n") for name, _, _ in lines))
    with new_figure(path, (8, 1.2 + height * len(lines))) as [axis]:
        for number, (_, score, (of_seeds, of_mean)) in enumerate(lines):
            dots = [factor * value for value in score["values"] if value is not None]
            axis.scatter(dots, [number] * len(dots), s=14, alpha=0.5, color=of_seeds)
            if not dots:
                axis.text(
                    0.01, number, "undefined", transform=axis.get_yaxis_transform(), va="center"
                )
            if score["interval"] is None:
                continue
            low, high = score["interval"]
            mean = score["mean"]
            reach = [[factor * (mean - low)], [factor * (high - mean)]]
            axis.errorbar(factor * mean, number, xerr=reach, fmt="D", capsize=3, color=of_mean)
        majority = [row["majority"]["mean"] for row in rows if row["majority"]["mean"] is not None]
        scores = [score for _, score, _ in lines]
        every = [one for score in scores for one in (*score["values"], *(score["interval"] or ()))]
        shown = [one for one in every if one is not None]
        if majority:
            shown.append(majority[0])
            axis.axvline(factor * majority[0], color="0.5", linestyle="--", linewidth=1)
        if shown:
            axis.set_xlim(
                of_scores((factor * score for score in shown), in_percent=metric.is_share())
            )
        axis.set_yticks(range(len(lines)), [name for name, _, _ in lines])
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.set_xlabel(
            f"{metric.title} on {found['split']}" + (", %" if metric.is_share() else "")
        )
        axis.grid(alpha=0.3, axis="x")
