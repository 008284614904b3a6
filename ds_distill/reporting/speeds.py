"""Size and speed of an evaluation's models beside its slowest teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def speed_columns(
    evaluation: Mapping[str, Any], measured: Mapping[str, Any] | None
) -> tuple[dict[str, list[str]], str]:
    """Columns of a table, by their heads, with a cell for each model; and what they mean.

    measured: `speed` of results.json, as `run.speed.quick_speed` makes it; None of a run that has
        none. The times of another task are not shown.
    """
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

    columns = {"parameters": [*map(size, models)]}
    note = "Behind parameters their part of the largest teacher's." if largest else ""
    if measured is None or measured["task"] != evaluation["task"]:
        return columns, note
    timed = {name: seconds for name in models if (seconds := measured["seconds"].get(name))}
    columns["a text"] = [
        f"{1e3 * timed[name]:.3g} ms" if name in timed else "not timed" for name in models
    ]
    slowest = max((name for name in teachers if name in timed), key=timed.__getitem__, default=None)
    against = ""
    if slowest:
        columns["speed-up"] = [
            f"{timed[slowest] / timed[name]:.1f}×" if name in timed else "" for name in models
        ]
        against = f" Speed-up against {slowest}, the slowest teacher."
    where = measured["device"]
    if where == "CPU":
        where = f"{measured['threads']} CPU thread{'s' if measured['threads'] > 1 else ''}"
    return columns, (
        f"{note} Time: the median of a few passes over one text of {measured['length']} tokens at "
        f"the end of the run, in fp32 on {where}; ds-distill profile measures longer.{against}"
    )
