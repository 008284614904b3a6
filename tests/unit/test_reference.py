"""The reference of recipes and their JSON schema: as the sections are, and true of recipes."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ds_distill.cli import app
from ds_distill.recipe import builtin_recipes
from ds_distill.recipe.json_schema import recipe_json_schema

ROOT = Path(__file__).parents[2]
SCHEMA = recipe_json_schema()
COMMAND = "python docs/reference.py"


def reference() -> Any:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_as_the_sections_are() -> None:
    made = reference()
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), f"out of date: {COMMAND}"
    assert made.SCHEMA.read_text(encoding="utf-8") == made.schema_text(), f"out of date: {COMMAND}"


def test_the_command_prints_the_schema() -> None:
    printed = CliRunner().invoke(app, ["recipes", "--schema"])
    assert json.loads(printed.stdout) == SCHEMA


def sections() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "Recipe", SCHEMA
    yield from SCHEMA["$defs"].items()


def test_every_key_says_what_it_means() -> None:
    silent = [
        f"{name}.{key}"
        for name, section in sections()
        for key, value in section["properties"].items()
        if not value.get("description")
    ]
    assert not silent, f"keys without a docstring: {', '.join(silent)}"


def test_the_page_has_every_key() -> None:
    page = reference().page()
    for name, section in sections():
        for key in section["properties"]:
            assert f"| `{key}` |" in page, f"{name}.{key}"
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings)) == len(SCHEMA["$defs"]) + 1


# ------------------------------------------------------------------------ what the schema says


def mistakes(value: Any, schema: dict[str, Any]) -> list[str]:
    """What a JSON schema finds wrong with a value: the keywords that ours has, and no others."""
    known = {
        *("$schema", "$defs", "title", "description", "default", "$ref", "anyOf", "enum", "const"),
        *("type", "properties", "required", "additionalProperties", "patternProperties", "items"),
        *("propertyNames", "minProperties", "maxProperties", "minItems", "minLength", "maxLength"),
        *("pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
    assert set(schema) <= known, set(schema) - known
    found: list[str] = []
    if "$ref" in schema:
        found += mistakes(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    if "anyOf" in schema:
        each = [mistakes(value, choice) for choice in schema["anyOf"]]
        found += [] if [] in each else [f"{value!r}: {each}"]
    rules: dict[str, Callable[[Any], bool]] = {
        "enum": lambda allowed: value in allowed,
        "const": lambda only: value == only,
        "type": lambda kind: is_a(value, kind),
    }
    if isinstance(value, int | float):
        rules |= {
            "minimum": lambda bound: value >= bound,
            "maximum": lambda bound: value <= bound,
            "exclusiveMinimum": lambda bound: value > bound,
            "exclusiveMaximum": lambda bound: value < bound,
        }
    if isinstance(value, str):
        rules |= {
            "pattern": lambda pattern: re.search(pattern, value) is not None,
            "minLength": lambda least: len(value) >= least,
            "maxLength": lambda most: len(value) <= most,
        }
    if isinstance(value, list):
        rules["minItems"] = lambda least: len(value) >= least
        found += [line for item in value for line in mistakes(item, schema.get("items", {}))]
    if isinstance(value, dict):
        rules |= {
            "required": lambda keys: set(keys) <= set(value),
            "minProperties": lambda least: len(value) >= least,
            "maxProperties": lambda most: len(value) <= most,
        }
        found += members(value, schema)
    return found + [
        f"{value!r} breaks {rule} {schema[rule]}"
        for rule, holds in rules.items()
        if rule in schema and not holds(schema[rule])
    ]


def members(value: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    found = []
    for key, inner in value.items():
        patterns = [s for p, s in schema.get("patternProperties", {}).items() if re.search(p, key)]
        rules = [
            *patterns,
            *([schema["properties"][key]] if key in schema.get("properties", {}) else []),
        ]
        rest = schema.get("additionalProperties", True)
        if not rules and rest is False:
            found.append(f"unknown key {key!r}")
        elif not rules and isinstance(rest, dict):
            rules = [rest]
        found += [line for rule in rules for line in mistakes(inner, rule)]
        found += mistakes(key, schema.get("propertyNames", {}))
    return found


def is_a(value: Any, kind: str) -> bool:
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    kinds: dict[str, Any] = {
        **{"string": str, "boolean": bool, "integer": int, "number": (int, float)},
        **{"array": list, "object": dict, "null": type(None)},
    }
    return isinstance(value, kinds[kind])


@pytest.mark.parametrize("name", builtin_recipes())
def test_the_schema_takes_what_is_right(name: str) -> None:
    assert (
        mistakes(yaml.safe_load(builtin_recipes()[name].read_text(encoding="utf-8")), SCHEMA) == []
    )


def test_the_schema_takes_every_short_form(
    toy_settings: dict[str, Any], masked_lm_settings: dict[str, Any]
) -> None:
    assert mistakes(toy_settings, SCHEMA) == mistakes(masked_lm_settings, SCHEMA) == []
    distil = {"losses": {"kl": None}, "routing": [{"policy": "expertise", "mix": "logits"}, "gate"]}
    phases = [
        "expertise",
        {"expertise": None},
        {"cache": {"splits": ["a", "b"]}},
        {"distil": distil},
    ]
    assert mistakes({**toy_settings, "phases": phases}, SCHEMA) == []
    for metric in ("macro_f1", {"name": "micro_f1", "leave_out": ["sad"]}):
        task = {**toy_settings["task"], "metric": metric}
        assert mistakes({**toy_settings, "task": task}, SCHEMA) == []


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a key that is none": lambda data: data.update(teacher={}),
    "a key of a section that is none": lambda data: data["student"].update(layer=[0]),
    "a phase that is none": lambda data: data["phases"].append("evalute"),
    "a phase without what it needs": lambda data: data["phases"].append("cache"),
    "two phases in one": lambda data: data["phases"][-1].update(expertise=None),
    "a policy that is none": lambda data: data["phases"][4]["distil"].update(routing="mean"),
    "a metric that is none": lambda data: data["task"].update(metric="f2"),
    "no task": lambda data: data.pop("task"),
    "a share above 1": lambda data: data["training"].update(warmup=1.5),
    "half an epoch": lambda data: data["training"].update(epochs=0.5),
    "a name with a space": lambda data: data.update(name="my run"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_schema_refuses_what_is_wrong(case: str, toy_settings: dict[str, Any]) -> None:
    data = copy.deepcopy(toy_settings)
    WRONG[case](data)
    assert mistakes(data, SCHEMA), case
