"""Write docs/reference.md from the sections of a recipe.

python docs/reference.py
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ds_distill.recipe import Recipe
from ds_distill.recipe.section import Section

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"

INTRODUCTION = """\
# Every key of a recipe

Written by `python docs/reference.py` from the docstrings in `ds_distill`; do not edit this page.
[recipes.md](recipes.md) explains how a recipe is read. A heading such as `task, type: masked-lm`
is the section that this key chooses. A key that an earlier section has too is explained there.

**In an editor.** The JSON schema of recipes completes keys and marks mistakes as you type:
`ds-distill recipes --schema > recipe.schema.json` writes it, without the parts of other packages.
With the YAML extension of VS Code, or another editor that runs
yaml-language-server, make this the first line of a recipe:

```text
# yaml-language-server: $schema=recipe.schema.json
```

`ds-distill check` finds what a schema cannot: data, models, and phases that do not fit each other.
"""


Schema = dict[str, Any]


class WithDocstrings(GenerateJsonSchema):
    """With what stands below each key as its description."""

    def model_schema(self, schema: Any) -> Schema:
        made, cls = super().model_schema(schema), schema["cls"]
        texts: dict[str, str] = {}
        for section in reversed(cls.__mro__[: cls.__mro__.index(Section)]):
            texts |= attribute_docstrings(section)
        for name, field in cls.model_fields.items():
            if texts.get(name):
                made["properties"][field.alias or name].setdefault("description", texts[name])
        return made


def attribute_docstrings(section: type) -> dict[str, str]:
    """Names that a class annotates -> the string below each, or an empty one."""
    found = dict.fromkeys(inspect.get_annotations(section), "")
    try:
        [body] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    except (OSError, TypeError):
        return found  # made without a source
    assert isinstance(body, ast.ClassDef)
    for field, below in pairwise(body.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def documented_schema() -> Schema:
    """The recipe's JSON schema, with the texts of all keys."""
    schema: Schema = plain(Recipe.model_json_schema(schema_generator=WithDocstrings))
    sections: dict[str, Schema] = schema["$defs"]
    one_phase = schema["properties"]["phases"]["items"]["anyOf"][0]
    for phase in one_phase["properties"].values():
        section = sections[choices(phase)[0]]
        del section["properties"]["kind"]
        phase.pop("default", None)
        phase.setdefault("description", section["description"])
    del schema["properties"]["name"]["default"]  # that is the file's name
    for section in (schema, *sections.values()):
        for value in section["properties"].values():
            texts = [sections[name].get("description", "") for name in choices(value)]
            if len(texts) == 1:  # what the section says of itself
                value.setdefault("description", texts[0])
            elif "const" in value:
                value.setdefault("description", "Chooses this section.")
    return schema


def choices(schema: Schema) -> list[str]:
    """Names of the sections that a schema stands for: one, those of a union, or none."""
    if "$ref" in schema:
        return [schema["$ref"].rpartition("/")[2]]
    return [name for each in schema.get("anyOf", []) for name in choices(each)]


def plain(schema: Any, keyword: str = "") -> Any:
    """Without the titles that pydantic makes of names, with descriptions on one line, and with
    `anyOf` for `oneOf`.

    keyword: what the schema stands under; keys of a recipe stand under `properties`.
    """
    if isinstance(schema, list):
        return [plain(item) for item in schema]
    if not isinstance(schema, dict) or keyword in ("default", "const", "enum"):
        return schema
    if keyword in ("properties", "patternProperties", "$defs"):
        return {name: plain(value) for name, value in schema.items()}
    made = {
        {"oneOf": "anyOf"}.get(key, key): plain(value, key)
        for key, value in schema.items()
        if key not in ("title", "discriminator")
    }
    if "description" in made:
        made["description"] = " ".join(made["description"].split())
    return made


def page() -> str:
    """Each key stands in the first section that has it so; later ones name it."""
    schema = documented_schema()
    parts = [INTRODUCTION]
    training = schema["$defs"]["Training"]["properties"]
    found = list(sections(schema))
    links = {name: link(title) for title, name, _ in found}
    first: dict[str, str] = {}
    for title, _, section in found:
        parts.append(f"\n## {title}\n\n{section.get('description', '')}\n")
        lines: list[str] = []
        repeated: dict[str, list[str]] = {}
        for key, value in section["properties"].items():
            line = row(key, value, key in section.get("required", []), links)
            if "const" in value:
                continue  # the heading says it
            if (where := first.setdefault(line, title)) == title:
                lines.append(line)
            else:
                repeated.setdefault(where, []).append(f"`{key}`")
        if lines:
            header = "| key | type | default | meaning |\n|---|---|---|---|"
            parts.append("\n".join(["", header, *lines, ""]))
        for where, keys in repeated.items():
            every = where == "training" and len(keys) == len(training)
            which = "all keys, which are its defaults" if every else ", ".join(keys)
            parts.append(f"\nAs in [{where}](#{anchor(where)}): {which}.\n")
    return "".join(parts)


def link(title: str) -> str:
    """A link to a heading: of one of several sections by its name, e.g. [masked-lm](#...)."""
    _, several, name = title.partition(", ")
    return f"[{name.rpartition(' ')[2] if several else 'section'}](#{anchor(title)})"


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


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
        item, *more = forms = [each for each in value["anyOf"] if each.get("type") != "null"]
        if more and forms[-1].get("items") in (item, {"anyOf": forms[:-1]}):
            return f"{type_of(forms[-1]['items'], links)}; or a list of them"
        sections = len(choices(value))
        if sections > 1:  # a name alone, which stands for a section, is among the links
            more = [each for each in more if "const" not in each]
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
