"""Size and speed of an evaluation's models beside its slowest teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Speeds:
    """As a table shows them, by model; the last two columns only of models that were timed."""

    parameters: dict[str, str]
    """`22.7 M (1/3)`: how many, and of a student the part of the largest teacher's."""
    milliseconds: dict[str, str]
    times_faster: dict[str, str]
    """Than the slowest teacher."""
    note: str


def speeds_of(evaluation: Mapping[str, Any], measured: Mapping[str, Any] | None) -> Speeds:
    """measured: `speed` of results.json, as `run.speed.quick_speed` makes it; None of a run that
    has none, or of another task."""
    models = evaluation["models"]
    teachers = [name for name, model in models.items() if model["role"] == "teacher"]
    sizes = {name: model.get("parameters", 0) for name, model in models.items()}
    largest = max((sizes[name] for name in teachers), default=0)

    def size(name: str) -> str:
        if not sizes[name]:
            return "-"
        shown = f"{sizes[name] / 1e6:.1f} M" if sizes[name] >= 1e5 else f"{sizes[name]:,}"
        part = f" ({sizes[name] / largest:.0%})" if largest and name not in teachers else ""
        return shown + part

    parameters = {name: size(name) for name in models}
    part = "In brackets the part of the largest teacher's." if largest else ""
    if measured is None or measured["task"] != evaluation["task"]:
        return Speeds(parameters, {}, {}, part)
    seconds = {name: measured["seconds"].get(name) for name in models}
    timed = {name: value for name, value in seconds.items() if value}
    slowest = max((name for name in teachers if name in timed), key=timed.__getitem__, default=None)
    where = measured["device"]
    if where == "CPU":
        where = f"{measured['threads']} CPU thread{'s' if measured['threads'] > 1 else ''}"
    against = f" Speed-up against {slowest}, the slowest teacher." if slowest else ""
    return Speeds(
        parameters,
        {name: f"{1e3 * value:.3g} ms" for name, value in timed.items()},
        {name: f"{timed[slowest] / value:.1f}×" for name, value in timed.items()}
        if slowest
        else {},
        f"{part} Time: the median of a few passes over one text of {measured['length']} tokens at "
        f"the end of the run, in fp32 on {where}; ds-distill profile measures longer.{against}",
    )
