"""A student with sizes of its own, from random weights: checked, planned, trained, judged and
shipped."""

import copy
import shutil

import pytest
from processes import python
from runs import evaluation, loaded, run_here
from toys import recipe_of
from transformers import AutoModelForMaskedLM

from ds_distill import load_recipe
from ds_distill.check.check import check_all
from ds_distill.files import read_json
from ds_distill.models.load import MASKED_LM, load_model
from ds_distill.models.student import student_config
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner


@pytest.fixture(scope="module")
def narrow(materials, tmp_path_factory):
    """A student with another width and depth than its teacher."""
    shape = tmp_path_factory.mktemp("narrow") / "shape"
    shutil.copytree(materials / "model", shape, ignore=shutil.ignore_patterns("*.safetensors"))
    return recipe_of("narrow", materials=materials, shape=shape)


def test_a_random_student_is_trained_evaluated_and_shipped(narrow, tmp_path):
    recipe = loaded(narrow, tmp_path)
    check_all(recipe)
    folder = run_here(narrow, tmp_path)
    models = evaluation(folder)["models"]
    assert models["student"]["parameters"] == models["start"]["parameters"]
    assert models["student"]["parameters"] < models["bert"]["parameters"]
    assert models["student"]["loss"] < models["start"]["loss"]
    config = read_json(folder / "student" / "config.json")
    assert (config["hidden_size"], config["num_hidden_layers"]) == (16, 1)
    planned = {model.name: model for model in Planner(recipe, GPUS["l4"], 1).plan().models}
    assert planned["student"].parameters == models["student"]["parameters"]
    card = (folder / "student" / "README.md").read_text()
    assert "Starts from random weights" in card and "config: {hidden_size: 16" in card
    assert "base_model" not in card
    code = (
        "import sys, transformers; sys.modules['ds_distill'] = None;"
        f"m = transformers.AutoModelForMaskedLM.from_pretrained({str(folder / 'student')!r});"
        "print(m.config.hidden_size)"
    )
    done = python(code)
    assert done.stdout.strip() == "16"


def test_a_truncated_student_begins_with_parts_of_its_model(narrow, materials, tmp_path):
    """And not where it would begin at random; the card says what it was."""
    made = copy.deepcopy(narrow)
    made["student"] = {
        "model": str(materials / "model"),
        "config": {"hidden_size": 16, "intermediate_size": 32},
        "layers": [1],
        "start": "truncated",
    }
    made["phases"] = [
        made["phases"][0],
        {"distil": {"losses": {"kl": {}}, "steps": 2}},
        {"evaluate": {"split": "test", "start": True}},
    ]
    folder = run_here(made, tmp_path)
    how = {"new_head": True, "layers": [1], "truncated": True}
    config = student_config(load_recipe(tmp_path / "recipe.yaml"))
    start = load_model(MASKED_LM, str(materials / "model"), config=config, **how)
    student = AutoModelForMaskedLM.from_pretrained(folder / "student")
    for name, weight in student.named_parameters():
        apart = (weight - start.get_parameter(name)).abs().max()
        assert apart <= 2 * 2 * made["training"]["learning_rate"], name
    card = (folder / "student" / "README.md").read_text()
    assert "start: truncated" in card and "layers" in card
