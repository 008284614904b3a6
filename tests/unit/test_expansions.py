"""What `check` says of models whose vocabulary a phase has expanded."""

from __future__ import annotations

from typing import Any

import pytest

from ds_distill.check.models import expanded_mistakes
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate

EXPAND = {"expand-vocabulary": {"task": "text", "size": 200, "save_as": "grown"}}
AGAIN = {"expand-vocabulary": {"task": "text", "size": 300, "start": "grown", "save_as": "more"}}
APART = {"expand-vocabulary": {"task": "text", "size": 200, "split": "b", "save_as": "apart"}}
ADAPT = {"fine-tune": {"task": "text", "models": "grown", "save_as": "domain"}}
EVALUATE = {"evaluate": {"task": "text"}}


def distil(task: str = "text", **how: Any) -> dict[str, Any]:
    settings = {"task": task, "follow": "a", "start": "grown", "losses": {"kl": {}}}
    return {"distil": {**settings, **how}}


def mistakes_of(*phases: dict[str, Any]) -> list[str]:
    model = {"model": "some/model"}
    text = {"type": "masked-lm", "data": {"path": "data"}}
    recipe = validate(
        Recipe,
        {
            "name": "expansions",
            "tasks": {"text": text, "topics": {"data": {"path": "data"}}},
            "teachers": {"a": model, "b": model},
            "student": model,
            "phases": list(phases),
        },
    )
    return [*map(str, expanded_mistakes(recipe, {}, {}))]


MORE = ["phases.distil: teacher 'domain'", "phases.expand-vocabulary has added", "start: NAME"]


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ((EXPAND, ADAPT, distil(follow="domain", start="student")), MORE),
        ((EXPAND, ADAPT, distil(follow=["a", "domain"], start="student")), MORE),
        ((EXPAND, ADAPT, distil(follow="domain", start="student", teachers="cached")), MORE),
        ((EXPAND, ADAPT, APART, distil(follow="domain", start="apart")), MORE),
        ((EXPAND, distil(follow=["a", "b"])), ["phases.distil: grown", "one teacher", "a, b"]),
        ((EXPAND, distil(teachers="cached")), ["phases.distil.teachers=cached", "teachers=live"]),
        (
            (EXPAND, distil(losses={"kl": {}, "teacher_cross_entropy": {}})),
            ["phases.distil.losses.teacher_cross_entropy", "words that grown has", "Take teacher"],
        ),
        ((EXPAND, distil(routing="mt-bert")), ["phases.distil.routing", "words that grown has"]),
        (
            (EXPAND, APART, distil(save_as="x"), distil(start="apart", save_as="y"), EVALUATE),
            ["phases.evaluate", "those of x, y", "phases.expand-vocabulary-2", "Expand once"],
        ),
    ],
)
def test_what_cannot_be_learnt_of_other_tokens(phases: Any, says: list[str]) -> None:
    [mistake] = mistakes_of(*phases)
    assert [part for part in says if part not in mistake] == [], mistake


def test_what_can_be_done_with_an_expanded_vocabulary() -> None:
    chain = (EXPAND, ADAPT, AGAIN, distil(save_as="x"))
    assert mistakes_of(*chain, distil(follow="domain", start="more"), EVALUATE) == []
    assert mistakes_of(*chain, distil(follow="domain", routing="mt-bert")) == []
    of_labels = {"follow": ["a", "b"], "routing": "mt-bert", "start": "x"}
    assert mistakes_of(*chain, distil("topics", **of_labels)) == []
    assert mistakes_of(*chain, distil("topics", start="x", teachers="cached")) == []
    one_meets_one = (EXPAND, APART, distil(save_as="x"), EVALUATE)
    assert mistakes_of(*one_meets_one) == []
