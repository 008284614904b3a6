"""Which student each built-in recipe ships, and by what: no training is needed to know it."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ds_distill.check.check import check_all, notes, open_sources, ships_the_last
from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.phases.evaluate import models_to_evaluate
from ds_distill.recipe import Recipe, builtin_recipes, load_recipe, small_form
from ds_distill.recipe.lineage import shippable
from ds_distill.recipe.phases import PHASES
from ds_distill.run.publish import choose_student

SHIPPED = yaml.safe_load(Path(__file__).with_name("shipped.yaml").read_text(encoding="utf-8"))
FORMS = [
    (name, small)
    for name, path in builtin_recipes().items()
    for small in (False, True)
    if not small or small_form(path).is_file()
]


@pytest.mark.parametrize(("name", "small"), FORMS)
def test_a_recipe_ships_the_student_that_it_is_named_for(name, small):
    recipe, expected = load_recipe(name, small=small), SHIPPED.get(name, ["student"])
    assert [one for _, one in shippable(recipe, CHOOSING_SPLIT)] == expected
    records = [
        {"trained": [{"output": one, "choosing": None} for one in phase.outputs]}
        for phase in recipe.phases
    ]
    number, student = choose_student(recipe, records)
    assert student == expected[-1] and student in recipe.phases[number].outputs
    # Several students are only where there are examples that choose.
    assert len(expected) == 1 or recipe.phases[number].keep == "best"
    last = len(recipe.phases) - 1
    if PHASES[recipe.phases[last].kind].makes == "evaluation":
        roles = models_to_evaluate(recipe, last)
        taught = any(PHASES[phase.kind].makes == "student" for phase in recipe.phases)
        assert roles[student] == ("student" if taught else "control")
        for control in {"labels-only", "no-teacher", "fine-tuned-student", "few-labels"} & {*roles}:
            assert roles[control] == "control", "it has learnt nothing from a teacher"


def test_what_is_shipped_unchosen_is_told():
    """Where nothing is to choose between several students, and the recipe says none."""
    with_validation = {"task": SimpleNamespace(splits=["train", "validation", "test"])}
    without = {"task": SimpleNamespace(splits=["train", "test"])}
    recipe = load_recipe("vekd", ["ships=null"])
    [note] = ships_the_last(recipe, without)
    assert note.startswith("the students are vekd, distilbert, and there is no split 'validation'")
    assert "the last, distilbert, is shipped. ships=NAME" in note
    assert ships_the_last(recipe, with_validation) == []
    assert ships_the_last(load_recipe("vekd"), without) == []
    assert ships_the_last(load_recipe("doktra"), without) == [], "one student and its control"


def test_check_and_a_run_tell_it(toy_settings):
    made = copy.deepcopy(toy_settings)
    made["task"]["data"]["splits"] = {"train": "train", "test": "test"}
    made["training"]["keep"] = "last"
    made["phases"] = [
        {"fine-tune": {"models": ["first", "second"]}},
        {"distil": {"routing": ["average", "random"], "losses": {"kl": {}}}},
    ]
    recipe = Recipe.model_validate(made)
    for found in (check_all(recipe), notes(recipe, open_sources(recipe))):
        assert any("the last, random, is shipped" in note for note in found)
