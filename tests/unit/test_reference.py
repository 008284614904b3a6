"""The reference of recipes and their JSON schema: as the sections are, and true of recipes."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from runs import command_line

from ds_distill.recipe import Recipe, builtin_recipes

ROOT = Path(__file__).parents[2]
SCHEMA = Recipe.model_json_schema()
COMMAND = "python docs/reference.py"


def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_as_the_sections_are():
    made = reference()
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), f"out of date: {COMMAND}"


def test_the_command_prints_the_schema():
    assert json.loads(command_line("recipes", "--schema").stdout) == SCHEMA


def sections():
    schema = reference().documented_schema()
    yield "Recipe", schema
    yield from schema["$defs"].items()


def test_every_key_says_what_it_means():
    silent = [
        f"{name}.{key}"
        for name, section in sections()
        for key, value in section["properties"].items()
        if not value.get("description")
    ]
    assert not silent, f"keys without a docstring: {', '.join(silent)}"


# ------------------------------------------------------------------------ what the schema says


def mistakes(value):
    """What the JSON schema finds wrong with a recipe."""
    return [error.message for error in Draft202012Validator(SCHEMA).iter_errors(value)]


@pytest.mark.parametrize("name", builtin_recipes())
def test_the_schema_takes_what_is_right(name):
    assert mistakes(yaml.safe_load(builtin_recipes()[name].read_text(encoding="utf-8"))) == []


def test_the_schema_takes_every_short_form(toy_settings, masked_lm_settings):
    assert mistakes(toy_settings) == mistakes(masked_lm_settings) == []
    distil = {"losses": {"kl": None}, "routing": [{"policy": "expertise", "mix": "logits"}, "gate"]}
    phases = [
        "expertise",
        {"expertise": None},
        {"cache": {"splits": ["a", "b"]}},
        {"distil": distil},
    ]
    assert mistakes({**toy_settings, "phases": phases}) == []
    for metric in ("macro_f1", {"name": "micro_f1", "leave_out": ["sad"]}):
        task = {**toy_settings["task"], "metric": metric}
        assert mistakes({**toy_settings, "task": task}) == []


WRONG = {
    "a key that is none": lambda data: data.update(teacher={}),
    "a key of a section that is none": lambda data: data["student"].update(layer=[0]),
    "a phase that is none": lambda data: data["phases"].append("evalute"),
    "a phase without what it needs": lambda data: data["phases"].append("cache"),
    "a policy that is none": lambda data: data["phases"][4]["distil"].update(routing="mean"),
    "a metric that is none": lambda data: data["task"].update(metric="f2"),
    "a share above 1": lambda data: data["training"].update(warmup=1.5),
    "half an epoch": lambda data: data["training"].update(epochs=0.5),
    "a name with a space": lambda data: data.update(name="my run"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_schema_refuses_what_is_wrong(case, toy_settings):
    data = copy.deepcopy(toy_settings)
    WRONG[case](data)
    assert mistakes(data), case
