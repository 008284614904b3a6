"""A profile of models as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_distill.errors import UserError
from ds_distill.profiling.models import ProfiledModel, points
from ds_distill.recipe.metrics import METRICS
from ds_distill.reporting.figures import new_figure, of_scores


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


_COLOURS = {"teacher": "tab:blue", "student": "tab:orange", "control": "tab:green"}
