"""Profiles as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_distill.errors import UserError
from ds_distill.profiling.models import ProfiledModel, points
from ds_distill.profiling.trainings import Profiled, parts_in_order
from ds_distill.recipe.metrics import METRICS
from ds_distill.reporting.figure_files import new_figure, of_scores


def plot_trainings(trainings: Sequence[Profiled], path: Path) -> None:
    """A bar for each training, of its parts."""
    with new_figure(path, (9, 1.2 + 0.45 * len(trainings))) as [axis]:
        parts = parts_in_order(one.seconds for one in trainings)
        names = [f"{one.phase}: {one.model}" for one in trainings][::-1]
        starts = [0.0] * len(trainings)
        axis.set_prop_cycle(color=_colours())
        for part in parts:
            widths = [1e3 * one.seconds.get(part, 0.0) for one in trainings][::-1]
            axis.barh(names, widths, left=starts, label=part)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axis.set_xlabel("milliseconds of a step")
        axis.grid(alpha=0.3, axis="x")
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def plot_models(models: Sequence[ProfiledModel], path: Path) -> None:
    """Quality against latency. Raises UserError where no model has a score."""
    found = points(models)
    if not found:
        raise UserError(f"--figure {path}: the run's evaluate phase gave no scores.")
    metric = next(over[models[0].metric] for over in METRICS.values() if models[0].metric in over)
    factor = 100 if metric.is_share() else 1
    found = {name: (x, factor * y) for name, (x, y) in found.items()}
    with new_figure(path, (7.5, 4.5)) as [axis]:
        for model in models:
            if model.name in found:
                axis.scatter(*found[model.name], s=40, color=_COLOURS.get(model.role, "grey"))
        limits = of_scores((score for _, score in found.values()), in_percent=metric.is_share())
        axis.set_ylim(limits)
        for names, point in _together(found, 0.04 * (limits[1] - limits[0])):
            axis.annotate(names, point, textcoords="offset points", xytext=(6, 4), fontsize=8)
        for role, colour in _COLOURS.items():
            axis.scatter([], [], color=colour, label=role)
        longest = max(case.length for case in models[0].cases)
        axis.set_xlabel(f"median milliseconds of one text of {longest} tokens")
        axis.set_ylabel(metric.title + (", %" if metric.is_share() else ""))
        axis.set_xlim(0, 1.3 * max(milliseconds for milliseconds, _ in found.values()))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _together(
    found: Mapping[str, tuple[float, float]], near_y: float
) -> list[tuple[str, tuple[float, float]]]:
    """Names, and where they stand: one line for models whose scores are no more than `near_y`
    apart, and whose times hardly are."""
    near_x = 0.1 * max(milliseconds for milliseconds, _ in found.values())
    groups: list[tuple[list[str], tuple[float, float]]] = []
    for name, (x, y) in found.items():
        for names, (other_x, other_y) in groups:
            if abs(x - other_x) <= near_x and abs(y - other_y) <= near_y:
                names.append(name)
                break
        else:
            groups.append(([name], (x, y)))
    return [(", ".join(names), point) for names, point in groups]


def _colours() -> list[Any]:
    """40, of which no two are alike: a training has a part for each teacher."""
    import matplotlib

    first, then = (matplotlib.colormaps[name] for name in ("tab20", "tab20b"))
    dark_before_light = [*range(0, 20, 2), *range(1, 20, 2)]
    return [*map(first, dark_before_light), *map(then, range(20))]


_COLOURS = {"teacher": "tab:blue", "student": "tab:orange", "control": "tab:green"}
