"""Which teachers are scored before which phase, and what stops a run."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_distill.evaluation.label_order import label_doubt
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate
from ds_distill.run.label_warnings import warn_of_teachers
from ds_distill.run.teacher_scores import _focus, _ready, _teaches_nothing

NAMES = ["a", "b", "c"]


def run_of(settings: dict[str, Any], phases: list[Any], **more: Any) -> Any:
    """A run of the toy recipe: `first` is trained by a phase, and `second` comes trained."""
    made = {**copy.deepcopy(settings), "phases": phases}
    recipe = validate(Recipe, made)
    trained_in = {output: number for number, output in reversed(list(recipe.trained_models()))}
    return SimpleNamespace(
        recipe=recipe,
        task=recipe.task,
        task_name="task",
        labels=["animal", "food", "weather"],
        profiler=None,
        data=SimpleNamespace(has_split=lambda split: True),
        teachers=lambda number: list(recipe.teachers),
        reference=lambda name, number: SimpleNamespace(
            name=name, trained=trained_in.get(name, number) < number
        ),
        **more,
    )


TEACH = {"fine-tune": {"models": "first", "focus": {"classes": ["food", "animal"]}}}
CACHE = {"cache": {"splits": ["transfer"]}}
DISTIL = {"distil": {"split": "transfer", "losses": {"kl": {}}}}
EVALUATE = {"evaluate": {}}


def ready(run: Any) -> list[list[str]]:
    return [[one.name for one in _ready(at, run)] for at in range(len(run.recipe.phases))]


def test_each_is_scored_as_soon_as_it_is_what_it_will_teach_as(
    toy_settings: dict[str, Any], masked_lm_settings: dict[str, Any]
) -> None:
    phases: list[Any] = [TEACH, CACHE, {"expertise": {}}, DISTIL, EVALUATE]
    both = ["first", "second"]
    of_all = run_of(toy_settings, phases)
    assert ready(of_all) == [["second"], ["second"], ["second"], both, []]
    assert _focus(3, of_all, SimpleNamespace(name="first")) == [1, 0]
    assert _focus(3, of_all, SimpleNamespace(name="second")) is None
    leaves: list[Any] = [*phases[:2], {"expertise": {"leave_out": "unqualified"}}, *phases[3:]]
    assert ready(run_of(toy_settings, leaves)) == [[], [], [], both, []], "that phase chooses"
    assert ready(run_of(toy_settings, [TEACH, CACHE, EVALUATE])) == [[], [], []], "none teaches"
    of_all.profiler = object()
    assert not any(ready(of_all)), "a short run says nothing of quality"
    tokens = run_of(masked_lm_settings, masked_lm_settings["phases"])
    assert not any(ready(tokens)), "no labels"


@pytest.mark.parametrize(
    ("predicted", "trained", "of_words", "stops"),
    [
        ([0] * 60 + [1] * 20 + [2] * 20, False, False, False),  # right
        ([1] * 60 + [2] * 20 + [0] * 20, False, False, True),  # in another order
        ([1] * 60 + [2] * 20 + [0] * 20, False, True, True),
        ([0] * 100, False, False, False),  # that label itself
        ([1] * 60 + [0] * 40, True, False, True),  # below it
        ([1] * 60 + [0] * 40, True, True, False),  # as it may be where most words are O
        ([0] * 56 + [1] * 44, True, False, False),  # as near as chance
    ],
)
def test_what_is_below_the_commonest_label_beyond_chance_stops(
    predicted: list[int], trained: bool, of_words: bool, stops: bool
) -> None:
    labels = np.array([0] * 60 + [1] * 20 + [2] * 20)
    found = label_doubt(np.eye(3)[predicted], labels, NAMES)
    run: Any = SimpleNamespace(task=SimpleNamespace(predicts="tag" if of_words else "class"))
    reference: Any = SimpleNamespace(trained=trained)
    assert (found is not None and _teaches_nothing(run, reference, found)) is stops


def test_a_checkpoint_that_is_only_evaluated_is_no_teacher_in_a_warning() -> None:
    lines: list[str] = []
    events: list[str] = []
    log = SimpleNamespace(
        info=lines.append, event=lambda kind, **about: events.append(about["text"])
    )
    found = label_doubt(np.eye(3)[[1, 1, 1, 1]], np.array([0, 0, 0, 1]), NAMES)
    assert found is not None and found.is_worthless
    run: Any = SimpleNamespace(log=log, kind=SimpleNamespace(label_doubt=lambda *given: found))
    for name, role, called in (
        ("ann", "teacher", "teacher ann"),
        ("ann", "checkpoint", "checkpoint ann"),
        ("checkpoint", "checkpoint", "checkpoint"),
    ):
        one: Any = SimpleNamespace(name=name, trained=True, label_map=None)
        [text] = warn_of_teachers(run, "evaluate", "test", [one], {name: None}, None, role)  # type: ignore[arg-type]
        assert text.startswith(f"{called}: accuracy 25.0% on test")
        assert lines[-1] == f"WARNING: {text}" and events[-1] == text
