"""Recipes of several tasks, teachers or students that cannot be are refused at once."""

import shutil
from pathlib import Path
from string import Template

import pytest
import yaml
from ci.test_entity_experts import write_data
from runs import written
from toys import make_toy_classifier, recipe_of, toy_vocabulary
from transformers import BertForMaskedLM

from ds_distill import load_recipe
from ds_distill.check.check import check_all
from ds_distill.errors import UserError

TEXT = Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8")
CASES = yaml.safe_load(Template(TEXT).substitute(known=len(toy_vocabulary())))


@pytest.fixture(scope="module")
def places(materials, toy_task, tiny_models, tmp_path_factory):
    """Of all that the recipes name."""
    root = tmp_path_factory.mktemp("places")
    write_data(root / "data")
    shutil.copytree(materials / "model", root / "bert")
    BertForMaskedLM.from_pretrained(materials / "model").save_pretrained(root / "bert")
    make_toy_classifier(root / "sound")
    given = {"materials": materials, "task": toy_task, "toy": tiny_models["toy"], "size": "999"}
    given |= {"texts": materials / "masked-lm", "shape": materials / "model"}
    return given | {name: root / name for name in ("data", "bert", "sound")}


@pytest.mark.parametrize(("name", "at"), [(n, at) for n in CASES for at in range(len(CASES[n]))])
def test_a_recipe_that_cannot_be_is_refused(name, at, places, tmp_path):
    recipe, case = written(recipe_of(name, **places), tmp_path), CASES[name][at]
    with pytest.raises(UserError) as refusal:
        check_all(load_recipe(recipe, case["set"]))
    assert [part for part in case["says"] if part not in str(refusal.value)] == []
