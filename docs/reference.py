"""Write docs/reference.md from the sections of a recipe.

python docs/reference.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_distill.recipe.json_schema import Schema, choices, recipe_json_schema

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"

INTRODUCTION = """\
# Every key of a recipe

Written by `python docs/reference.py` from the docstrings in `ds_distill`; do not edit this page.
[recipes.md](recipes.md) explains how a recipe is read.

**In an editor.** The JSON schema of recipes completes keys and marks mistakes as you type:
`ds-distill recipes --schema > recipe.schema.json` writes it, without the parts of other packages.
With the YAML extension of VS Code, or another editor that runs
yaml-language-server, make this the first line of a recipe:

```text
# yaml-language-server: $schema=recipe.schema.json
```

`ds-distill check` finds what a schema cannot: data, models, and phases that do not fit each other.
"""


def page() -> str:
    schema = recipe_json_schema()
    parts = [INTRODUCTION]
    training = schema["$defs"]["Training"]["properties"]
    found = list(sections(schema))
    links = {name: link(title) for title, name, _ in found}
    for title, _, section in found:
        shared = {} if title == "training" else training
        parts.append(f"\n## {title}\n\n{section.get('description', '')}\n")
        lines = [
            row(key, value, key in section.get("required", []), links)
            for key, value in own_keys(section, shared)
        ]
        if lines:
            header = "| key | type | default | meaning |\n|---|---|---|---|"
            parts.append("\n".join(["", header, *lines, ""]))
        if len(lines) < len(section["properties"]):
            parts.append("\nAnd all keys of [training](#training), which are its defaults.\n")
    return "".join(parts)


def link(title: str) -> str:
    """A link to a heading: of one of several sections by its name, e.g. [masked-lm](#...)."""
    anchor = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
    _, several, name = title.partition(", ")
    return f"[{name.rpartition(' ')[2] if several else 'section'}](#{anchor})"


def own_keys(section: Schema, shared: Schema) -> Iterator[tuple[str, Schema]]:
    """Keys of a section, without those of `training` that it has unchanged."""
    keys = section["properties"]
    repeats = bool(shared) and shared.items() <= keys.items()
    return ((key, value) for key, value in keys.items() if not (repeats and key in shared))


def sections(schema: Schema) -> Iterator[tuple[str, str, Schema]]:
    """(title, name, section) of the recipe and of all that is in it, each section once: its title
    is where it stands in a recipe."""
    seen: set[str] = set()

    def within(title: str, section: Schema) -> Iterator[tuple[str, str, Schema]]:
        for key, value in section["properties"].items():
            yield from below(f"{title}.{key}" if title else key, value)

    def below(title: str, value: Schema) -> Iterator[tuple[str, str, Schema]]:
        if title == "phases":
            for kind, body in value["items"]["anyOf"][0]["properties"].items():
                yield from named(f"phases: {kind}", choices(body))
        for name, body in value.get("properties", {}).items():
            yield from named(f"losses: {name}", choices(body))
        for inner in value.get("patternProperties", {}).values():
            yield from below(f"{title}.NAME", inner)
        yield from named(title, choices(value))

    def named(title: str, names: list[str]) -> Iterator[tuple[str, str, Schema]]:
        for name in names:
            if name not in seen:
                seen.add(name)
                section = schema["$defs"][name]
                yield (f"{title}, {tag_of(section)}" if len(names) > 1 else title), name, section
                yield from within(title, section)

    yield "The recipe", "", schema
    yield from within("", schema)


def tag_of(section: Schema) -> str:
    """`type: masked-lm` of a section that is one of several, chosen by that key."""
    for key, value in section["properties"].items():
        if "const" in value:
            return f"{key}: {value['const']}"
    return ""


def row(key: str, value: Schema, required: bool, links: dict[str, str]) -> str:
    default = value.get("default")
    shown = "required" if required else f"`{as_yaml(default)}`"
    if not required and (default is None or isinstance(default, dict)):
        shown = ""  # what the text says, or the defaults of the section's keys
    cells = [f"`{key}`", type_of(value, links), shown, value.get("description", "")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def type_of(value: Schema, links: dict[str, str]) -> str:
    """A type in words: `integer ≥ 1`, `text, or a list of them`, a link to a section."""
    if "$ref" in value:
        [name] = choices(value)
        return links[name]
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    if "anyOf" in value:
        item, *more = (each for each in value["anyOf"] if each.get("type") != "null")
        if more and more[0].get("items") == item:
            return f"{type_of(item, links)}; or a list of them"
        sections = len(choices(value))
        if sections > 1:  # a name alone, which stands for a section, is among the links
            more = [each for each in more if "enum" not in each]
        kinds = dict.fromkeys(type_of(each, links) for each in (item, *more))
        return (", " if sections > 1 else " or ").join(kinds)
    if value.get("type") == "array":
        sections = value.get("minItems") and "anyOf" in value["items"]
        return "list of sections" if sections else f"list of: {type_of(value['items'], links)}"
    if "properties" in value:
        return "TERM: section"
    if "patternProperties" in value or isinstance(value.get("additionalProperties"), dict):
        inner = [*value.get("patternProperties", {}).values(), value.get("additionalProperties")]
        return f"NAME: {type_of(inner[0], links)}"
    kind = {"string": "text", "boolean": "true or false"}.get(value["type"], value["type"])
    bounds = [f"{sign} {value[bound]}" for bound, sign in BOUNDS.items() if bound in value]
    return " ".join([kind, ", ".join(bounds)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
