"""The JSON schema of recipes, for editors: of a recipe as it is written.

pydantic's own schema is of a recipe as it is after loading, where a phase holds its kind and a list
is a list. What a file may leave out or write shorter is added here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ds_distill.recipe.schema import Recipe, Section

Schema = dict[str, Any]


def recipe_json_schema() -> Schema:
    """JSON schema (draft 2020-12) of a recipe file, with the parts of other packages that are
    installed."""
    schema: Schema = _plain(Recipe.model_json_schema())
    sections: dict[str, Schema] = schema["$defs"]
    for name, section in sections.items():
        for key in _short_forms(name):
            value = section["properties"][key]
            lists = [one for one in value.get("anyOf", []) if "items" in one]
            if "items" in value:
                _allow_one(value, sections)
            elif lists:  # or null
                value["anyOf"] = [*(one["items"] for one in lists), *value["anyOf"]]
            elif choices(value):
                value["anyOf"] = _or_a_name(value, sections)
    phases = schema["properties"]["phases"]
    phases["items"] = _one_key(phases["items"], sections)
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


def _one_key(phases: Schema, sections: dict[str, Schema]) -> Schema:
    """An item of `phases`: one key with its settings; the key alone where none is required."""
    kinds: dict[str, Schema] = {}
    bare = []
    for name in choices(phases):
        section = sections[name]
        kind = section["properties"].pop("kind")["const"]
        required = [key for key in section.pop("required", []) if key != "kind"]
        if required:
            section["required"] = required
            kinds[kind] = {"$ref": f"#/$defs/{name}"}
        else:
            bare.append(kind)
            kinds[kind] = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
        kinds[kind]["description"] = section.get("description", "")
    one = {"type": "object", "properties": kinds, "additionalProperties": False}
    return {"anyOf": [{**one, "minProperties": 1, "maxProperties": 1}, {"enum": bare}]}


def _short_forms(section: str) -> set[str]:
    """Keys of a section that can be written shorter: those that a validator sees before pydantic
    does."""
    return {
        key
        for kind in _subclasses(Section)
        if kind.__name__ == section
        for validator in kind.__pydantic_decorators__.field_validators.values()
        if validator.info.mode == "before"
        for key in validator.info.fields
    }


def _subclasses(kind: type[Section]) -> Iterator[type[Section]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _allow_one(schema: Schema, sections: dict[str, Schema]) -> None:
    """Let a list be written as one item; and an item that is a part, as the part's name."""
    item = schema.pop("items")
    if choices(item):
        item = {"anyOf": _or_a_name(item, sections)}
    del schema["type"]
    schema["anyOf"] = [item, {"type": "array", "items": item}]


def _or_a_name(schema: Schema, sections: dict[str, Schema]) -> list[Schema]:
    """What a part's settings can be, with the part's name alone."""
    keys = (sections[name]["properties"].values() for name in choices(schema))
    names = [key["const"] for properties in keys for key in properties if "const" in key]
    return [*schema.get("anyOf", [schema]), {"enum": names}]
