"""How trainings went: losses and validation scores by optimizer step, as small figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.terms import TERMS
from ds_distill.reporting.page import Block, Figure, Figures, Fold, Section, Text, tag

MOST_POINTS = 200
"""Of a line; of more, each as many times further apart."""
WIDTH, HEIGHT = 240, 110
"""Of a panel, in its own units."""
COLOURS = 6
"""That the page's style has, `line-0` the first."""
UNFOLDED = 6
"""Trainings that are shown at once."""

Points = list[tuple[int, float]]
"""(optimizer step, value), in order."""


def curves(
    events: Iterable[Mapping[str, Any]], phases: Sequence[str], metrics: Sequence[MetricClass]
) -> Section | None:
    """Of a run's events, the trainings in their order; None without any.

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
    found: list[Block] = []
    for (number, models), of_terms in losses.items():
        if len(of_terms) == 2:  # its one term is the loss
            of_terms = {"loss": of_terms["loss"]}
        name = f"curve-{phases[number]}-{models}"
        panels = [panel(name, models, "loss", of_terms, lambda value: f"{value:.3g}")]
        metric = metrics[number]
        judged = {
            model: scores[number, model] for model in models.split("+") if (number, model) in scores
        }
        if judged:
            title = f"{metric.title} on validation"
            panels.append(panel(name, models, title, judged, metric.shown_as))
        within = f" in {phases[number]}" if phases[number] != models else ""
        found.append(Section(models + within, [Figures(panels)], level=3))
    if not found:
        return None
    note = (
        "From metrics.jsonl; a loss is the mean of the steps since the last event, each term with "
        "its weight. Beside a name its last value."
    )
    if more := found[UNFOLDED:]:
        found[UNFOLDED:] = [Fold(f"{len(more)} more trainings", more)]
    return Section("How the models learnt", [*found, Text(note, "soft")])


def panel(
    name: str, models: str, title: str, lines: Mapping[str, Points], shown: Callable[[float], str]
) -> Figure:
    """Lines over the steps of a training.

    name: of its file, with the title. models: those that it trained.
    """
    values = [v for points in lines.values() for _, v in points if math.isfinite(v)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = max((step for points in lines.values() for step, _ in points), default=0)
    span = high - low

    def drawn(points: Points, colour: str) -> Markup:
        every = math.ceil(len(points) / MOST_POINTS)
        kept = [
            (WIDTH * step / max(steps, 1), HEIGHT * (high - value) / span if span else HEIGHT / 2)
            for step, value in points[::-1][::every][::-1]  # the last one is among them
            if math.isfinite(value)
        ]
        if len(kept) == 1:  # of which a polyline shows nothing
            [(x, y)] = kept
            return tag("circle", cx=x, cy=y, r=3, class_=colour)
        return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in kept), class_=colour)

    found, entries = [tag("rect", width=WIDTH, height=HEIGHT, class_="frame")], []
    for number, (line, points) in enumerate(lines.items()):
        colour = f"line-{number % COLOURS}"
        found.append(drawn(points, colour))
        last = f" {line} {shown(points[-1][1])}"
        entries.append(tag("span", tag("span", "■", class_=colour), last, class_="entry"))
    axis = f"{title}, {shown(low)} to {shown(high)}, {steps:,} steps"
    caption = Markup("{} {}").format(tag("strong", axis), Markup(" ").join(entries))
    box = (-4, -4, WIDTH + 8, HEIGHT + 8)
    label = f"{models}: {axis}"
    return Figure(f"{name}-{title}", label, box, found, caption, 19)
