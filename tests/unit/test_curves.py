"""Learning curves of a report, from the events of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ds_distill.recipe.metrics import METRICS
from ds_distill.reporting.curves import HEIGHT, MOST_POINTS, WIDTH, trainings_of
from ds_distill.reporting.page import environment

ACCURACY, LOSS = METRICS["classes"]["accuracy"], METRICS["masked tokens"]["loss"]


def train(number: int, phase: str, step: int, **losses: float) -> dict[str, Any]:
    about = {"event": "train", "time": 1.0, "learning_rate": 0.1, "examples_per_second": 9.0}
    return {**about, "number": number, "phase": phase, "step": step, **losses}


def validation(number: int, phase: str, step: int, **scores: Any) -> dict[str, Any]:
    return {"event": "validation", "number": number, "phase": phase, "step": step, **scores}


def drawn(found: list[Any]) -> str:
    """The panels as a page has them."""
    template = environment().get_template("curves.html.jinja")
    return template.render(trainings=found, width=WIDTH, height=HEIGHT)


def losses(*values: float) -> list[dict[str, Any]]:
    return [train(0, "student", step, loss=value) for step, value in enumerate(values, start=1)]


def test_each_training_has_its_losses_and_its_score():
    events = [
        train(0, "a+b", 10, loss=3.0, cross_entropy=3.0),
        {"event": "epoch", "number": 0, "phase": "a+b", "step": 10, "epoch": 0},
        validation(0, "a", 10, accuracy=0.5, ece=0.9),
        validation(0, "b", 10, accuracy=0.25),
        train(0, "a+b", 20, loss=1.0, cross_entropy=1.0),
        validation(0, "a", 20, accuracy=0.75),
        train(2, "student", 10, loss=2.0, kl=1.5, cosine=0.5, **{"cosine.other": 7.0}),
    ]
    first, second = trainings_of(events, ["teach", "cache", "distil"], [ACCURACY, ACCURACY, LOSS])
    assert (first.phase, first.models) == ("teach", "a+b")
    assert (second.phase, second.models) == ("distil", "student")
    losses, scores = first.panels
    assert [line.name for line in losses.lines] == ["loss"], "one term is the loss itself"
    assert losses.lines[0].drawn == f"{WIDTH / 2:.1f},0.0 {WIDTH:.1f},{HEIGHT:.1f}"
    assert (losses.low, losses.high, losses.steps) == ("1", "3", 20)
    assert [(line.name, line.last) for line in scores.lines] == [("a", "75.0%"), ("b", "25.0%")]
    assert scores.title == "accuracy on validation"
    [only] = second.panels
    assert [line.name for line in only.lines] == ["loss", "kl", "cosine"]


def test_a_term_that_ends_where_another_begins_is_seen():
    events = [train(0, "student", 1, loss=2.0, kl=2.0)]
    events.append(train(0, "student", 2, loss=1.0, cross_entropy=1.0))
    [training] = trainings_of(events, ["distil"], [ACCURACY])
    assert [line.name for line in training.panels[0].lines] == ["loss", "kl", "cross_entropy"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_long_trainings_are_thinned_to_their_last_finite_point(value):
    events = losses(*(1 / step for step in range(1, 5001)), value)
    [training] = trainings_of(events, ["distil"], [ACCURACY])
    points = training.panels[0].lines[0].drawn.split()
    assert 100 < len(points) <= MOST_POINTS
    [training] = trainings_of(events[:-1], ["distil"], [ACCURACY])
    assert training.panels[0].lines[0].drawn.split()[-1].startswith(f"{WIDTH:.1f},")
    [training] = trainings_of(losses(1.0, value), ["distil"], [ACCURACY])
    assert len(training.panels[0].lines[0].drawn.split()) == 1
    undefined = [*losses(1.0), validation(0, "student", 1, accuracy=None)]
    [training] = trainings_of(undefined, ["distil"], [ACCURACY])
    assert [panel.title for panel in training.panels] == ["loss"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_lone_point_is_seen_and_equal_ones_are_in_the_middle(count):
    """A polyline of one point shows nothing: the panel of a training of one epoch was empty."""
    events = [train(0, "student", step, loss=2.0 - step) for step in range(2)]
    events += [validation(0, "student", step + 1, accuracy=0.5) for step in range(count)]
    found = trainings_of(events, ["distil"], [ACCURACY])
    line = found[0].panels[1].lines[0]
    assert line.drawn.split()[-1] == f"{WIDTH:.1f},{HEIGHT / 2:.1f}"
    assert line.dot == ((f"{WIDTH:.1f}", f"{HEIGHT / 2:.1f}") if count == 1 else None)
    page = drawn(found)
    assert (page.count("<circle"), page.count("<polyline")) == (2 - count, count)


@pytest.mark.parametrize("count", [6, 7])
def test_many_trainings_are_folded(count):
    events = [train(number, f"<b>{number}", 1, loss=1.0) for number in range(count)]
    found = trainings_of(events, ["distil"] * count, [ACCURACY] * count)
    page = drawn(found)
    assert page.count("<svg") == count and "<b>" not in page
    assert page.count("<details") == page.count("</details") == (count > 6)
