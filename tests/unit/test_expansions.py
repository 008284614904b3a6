"""What `check` says of models whose vocabulary a phase has expanded. The cases are in
expansions.yaml."""

from pathlib import Path

import pytest
import yaml

from ds_distill.check.models import expanded_mistakes
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate

*_, CASES = yaml.safe_load(Path(__file__).with_name("expansions.yaml").read_text(encoding="utf-8"))
MODEL = {"model": "some/model"}
TASKS = {
    "text": {"type": "masked-lm", "data": {"path": "data"}},
    "topics": {"data": {"path": "data"}},
}
SETTINGS = {"name": "expansions", "tasks": TASKS, "teachers": dict.fromkeys("ab", MODEL)}


@pytest.mark.parametrize("name", CASES)
def test_what_can_and_cannot_be_learnt_of_other_tokens(name):
    case = CASES[name]
    recipe = validate(Recipe, {**SETTINGS, "student": MODEL, "phases": case["phases"]})
    found = [*map(str, expanded_mistakes(recipe, {}, {}))]
    assert len(found) == ("says" in case), found
    assert [part for part in case.get("says", []) if part not in found[0]] == [], found
