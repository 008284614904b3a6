"""Learning curves of a report, from the events of a run."""

import math
import re

import pytest

from ds_distill.recipe.metrics import METRICS
from ds_distill.reporting.page import Page, Section
from ds_distill.reporting.report import HEIGHT, MOST_POINTS, WIDTH, curves

ACCURACY, LOSS = METRICS["classes"]["accuracy"], METRICS["masked tokens"]["loss"]


def train(number, phase, step, **losses):
    about = {"event": "train", "time": 1.0, "learning_rate": 0.1, "examples_per_second": 9.0}
    return {**about, "number": number, "phase": phase, "step": step, **losses}


def validation(number, phase, step, **scores):
    return {"event": "validation", "number": number, "phase": phase, "step": step, **scores}


def losses(*values):
    return [train(0, "student", step, loss=value) for step, value in enumerate(values, start=1)]


def trainings(events, phases, metrics):
    """The parts of the page, one for each training."""
    found = curves(iter(events), phases, metrics)
    return [block for block in found.blocks if isinstance(block, Section)]


def figures(training):
    [block] = training.blocks
    return list(block.figures)


def points(events):
    """Of the losses' line."""
    [training] = trainings(events, ["distil"], [ACCURACY])
    [drawn] = re.findall('points="([^"]*)"|cx="([^"]*)"', figures(training)[0].svg())
    return "".join(drawn).split()


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
    first, second = trainings(events, ["teach", "cache", "distil"], [ACCURACY, ACCURACY, LOSS])
    assert (first.title, second.title) == ("a+b in teach", "student in distil")
    losses, scores = figures(first)
    one_term = "<strong>loss, 1 to 3, 20 steps</strong> "
    assert losses.caption.startswith(one_term) and losses.caption.count("entry") == 1
    assert f'points="{WIDTH / 2:.1f},0.0 {WIDTH:.1f},{HEIGHT:.1f}"' in losses.svg()
    assert scores.label == "a+b: accuracy on validation, 25.0% to 75.0%, 20 steps"
    assert " a 75.0%<" in scores.caption and " b 25.0%<" in scores.caption
    [only] = figures(second)
    assert re.findall(r"</span> (\w+) ", only.caption) == ["loss", "kl", "cosine"]


def test_a_term_that_ends_where_another_begins_is_seen():
    events = [train(0, "student", 1, loss=2.0, kl=2.0)]
    events.append(train(0, "student", 2, loss=1.0, cross_entropy=1.0))
    [training] = trainings(events, ["distil"], [ACCURACY])
    caption = figures(training)[0].caption
    assert re.findall(r"</span> (\w+) ", caption) == ["loss", "kl", "cross_entropy"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_long_trainings_are_thinned_to_their_last_finite_point(value):
    events = losses(*(1 / step for step in range(1, 5001)), value)
    assert 100 < len(points(events)) <= MOST_POINTS
    assert points(events[:-1])[-1].startswith(f"{WIDTH:.1f},")
    assert len(points(losses(1.0, value))) == 1
    undefined = [*losses(1.0), validation(0, "student", 1, accuracy=None)]
    [training] = trainings(undefined, ["distil"], [ACCURACY])
    assert len(figures(training)) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_lone_point_is_seen_and_equal_ones_are_in_the_middle(count):
    """A polyline of one point shows nothing: the panel of a training of one epoch was empty."""
    events = [train(0, "student", step, loss=2.0 - step) for step in range(2)]
    events += [validation(0, "student", step + 1, accuracy=0.5) for step in range(count)]
    [training] = trainings(events, ["distil"], [ACCURACY])
    drawn = figures(training)[1].svg()
    lone = f'<circle cx="{WIDTH:.1f}" cy="{HEIGHT / 2:.1f}" r="3"'
    assert (lone if count == 1 else f' {WIDTH:.1f},{HEIGHT / 2:.1f}"') in drawn
    assert (drawn.count("<circle"), drawn.count("<polyline")) == (2 - count, count - 1)


@pytest.mark.parametrize("count", [6, 7])
def test_many_trainings_are_folded(count):
    events = [train(number, f"<b>{number}", 1, loss=1.0) for number in range(count)]
    found = curves(events, ["distil"] * count, [ACCURACY] * count)
    page = Page("", "", [found]).html()
    assert page.count("<svg") == count and "<b>" not in page
    assert page.count("<details") == page.count("</details") == (count > 6)
