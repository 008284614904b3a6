"""The JSON schema of recipes, for editors: pydantic's, as short and plain as a page can use it."""

from __future__ import annotations

import json
from typing import Any

from ds_distill.recipe.schema import Recipe

Schema = dict[str, Any]


def recipe_json_schema() -> Schema:
    """JSON schema (draft 2020-12) of a recipe file, with the parts of other packages that are
    installed."""
    schema: Schema = _plain(Recipe.model_json_schema())
    sections: dict[str, Schema] = schema["$defs"]
    sections.pop("Phase", None)
    one_phase = schema["properties"]["phases"]["items"]["anyOf"][0]
    for phase in one_phase["properties"].values():
        section = sections[choices(phase)[0]]
        del section["properties"]["kind"]
        phase.pop("default", None)
        phase.setdefault("description", section["description"])
    schema["required"].remove("name")  # the file's name is its default
    schema["anyOf"] = [{"required": ["task"]}, {"required": ["tasks"]}]
    for section in (schema, *sections.values()):
        for value in section["properties"].values():
            texts = [sections[name].get("description", "") for name in choices(value)]
            if len(texts) == 1:  # what the section says of itself
                value.setdefault("description", texts[0])
            elif "const" in value:
                value.setdefault("description", "Chooses this section.")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe", **schema}


def schema_text() -> str:
    """The schema as a file has it."""
    return json.dumps(recipe_json_schema(), indent=2, ensure_ascii=False) + "\n"


def choices(schema: Schema) -> list[str]:
    """Names of the sections that a schema stands for: one, those of a union, or none."""
    if "$ref" in schema:
        return [schema["$ref"].rpartition("/")[2]]
    return [name for each in schema.get("anyOf", []) for name in choices(each)]


def _plain(schema: Any, keyword: str = "") -> Any:
    """Without the titles that pydantic makes of names, with descriptions on one line, and with
    `anyOf` for `oneOf`: a task without a type fits more than one of its kinds.

    keyword: what the schema stands under; keys of a recipe stand under `properties`.
    """
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict) or keyword in ("default", "const", "enum"):
        return schema
    if keyword in ("properties", "patternProperties", "$defs"):
        return {name: _plain(value) for name, value in schema.items()}
    plain = {
        {"oneOf": "anyOf"}.get(key, key): _plain(value, key)
        for key, value in schema.items()
        if key not in ("title", "discriminator")
    }
    if "description" in plain:
        plain["description"] = " ".join(plain["description"].split())
    return plain
