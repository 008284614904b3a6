"""How trainings went: losses and validation scores by optimizer step, as small figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.terms import TERMS

MOST_POINTS = 200
"""Of a line; of more, each as many times further apart."""
WIDTH, HEIGHT = 240, 110
"""Of a panel, in its own units."""
COLOURS = 6
"""That the page's style has, `line-0` the first."""

Points = list[tuple[int, float]]
"""(optimizer step, value), in order."""


@dataclass(frozen=True)
class Line:
    name: str
    colour: int
    drawn: str
    """Points of an SVG polyline."""
    last: str
    """Its last value."""

    @property
    def dot(self) -> tuple[str, str] | None:
        """Where a lone point is, of which a polyline shows nothing."""
        x, y = self.drawn.split(",") if self.drawn.count(",") == 1 else ("", "")
        return (x, y) if x else None


@dataclass(frozen=True)
class Panel:
    """A figure of lines over the steps of a training."""

    title: str
    lines: list[Line]
    low: str
    high: str
    """Bounds of its axis."""
    steps: int


@dataclass(frozen=True)
class Training:
    """What metrics.jsonl says of one training."""

    phase: str
    models: str
    """Names of those that it trained, joined by `+`."""
    panels: list[Panel]


def trainings_of(
    events: Iterable[Mapping[str, Any]], phases: Sequence[str], metrics: Sequence[MetricClass]
) -> list[Training]:
    """Of a run's events, the trainings in their order.

    phases: their names. metrics: of each phase, the one by which its models are compared.
    """
    losses: dict[tuple[int, str], dict[str, Points]] = {}
    scores: dict[tuple[int, str], Points] = {}
    for event in events:
        at, step = (event["number"], event["phase"]), event.get("step", 0)
        if event["event"] == "train":
            of_terms = losses.setdefault(at, {"loss": []})
            for name in ("loss", *(name for name in event if name in TERMS)):
                of_terms.setdefault(name, []).append((step, event[name]))
        elif event["event"] == "validation":
            value = event.get(metrics[event["number"]].name)
            if value is not None:
                scores.setdefault(at, []).append((step, value))
    found = []
    for (number, models), of_terms in losses.items():
        if len(of_terms) == 2:  # its one term is the loss
            of_terms = {"loss": of_terms["loss"]}
        panels = [_panel("loss", of_terms, lambda value: f"{value:.3g}")]
        metric = metrics[number]
        judged = {
            name: scores[number, name] for name in models.split("+") if (number, name) in scores
        }
        if judged:
            panels.append(_panel(f"{metric.title} on validation", judged, metric.shown_as))
        found.append(Training(phases[number], models, panels))
    return found


def _panel(title: str, lines: Mapping[str, Points], shown: Callable[[float], str]) -> Panel:
    values = [v for points in lines.values() for _, v in points if math.isfinite(v)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = max((step for points in lines.values() for step, _ in points), default=0)
    span = high - low

    def height(value: float) -> float:
        return HEIGHT * (high - value) / span if span else HEIGHT / 2

    def drawn(points: Points) -> str:
        every = math.ceil(len(points) / MOST_POINTS)
        kept = points[::-1][::every][::-1]  # the last one is among them
        return " ".join(
            f"{WIDTH * step / max(steps, 1):.1f},{height(value):.1f}"
            for step, value in kept
            if math.isfinite(value)
        )

    made = [
        Line(name, number % COLOURS, drawn(points), shown(points[-1][1]))
        for number, (name, points) in enumerate(lines.items())
    ]
    return Panel(title, made, shown(low), shown(high), steps)
