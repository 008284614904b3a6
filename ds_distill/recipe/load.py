"""From a YAML file and key=value overrides to a Recipe, with errors that name the line."""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from ds_distill.errors import UserError, did_you_mean
from ds_distill.files import files_beside
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.section import Section
from ds_distill.recipe.text import Dumper, Places, read


def builtin_recipes() -> dict[str, Path]:
    """Names and files of the recipes that come with the package."""
    folder = Path(str(importlib.resources.files("ds_configs"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def recipe_path(reference: str | Path) -> Path:
    """The file of a recipe given as a path or as a built-in's name.

    Raises UserError when it is neither.
    """
    path = Path(reference)
    if os.path.isfile(path):
        return path
    reference, builtin = str(reference), builtin_recipes()
    if reference in builtin:
        return builtin[reference]
    if path.is_dir():
        inside = path / "recipe.yaml"
        name = f" This run's is {inside}." if inside.is_file() else ""
        raise UserError(
            f"recipe {reference!r} is a folder. A recipe is a file or a built-in name.{name}"
        )
    near = [*builtin, *(name for name in files_beside(path) if name.endswith(".yaml"))]
    raise UserError(
        f"recipe {reference!r} is neither a file nor a built-in "
        f"recipe.{did_you_mean(reference, near)} Built-in: {', '.join(builtin)}."
    )


def small_form(path: Path) -> Path:
    """Where the small form of a recipe's file is: in the folder `small` beside it, if anywhere."""
    return path.parent / "small" / path.name


def load_recipe(
    reference: str | Path, overrides: Sequence[str] = (), small: bool = False
) -> Recipe:
    """Read a recipe (file or built-in name) and apply `key=value` overrides.

    Keys are dotted (`task.data.path`); a phase is addressed by its name, kind or number
    (`phases.distil.epochs=1`). Values are read as YAML. A recipe without `name` is called as its
    file.

    small: lay the recipe's small form, FOLDER/small/FILE, over it before the overrides. A section
        there changes the keys that it names, `phases: {NAME: {...}}` the phase of that name; null
        removes a key or a phase; all else replaces what the recipe has. `-small` is added to the
        recipe's name, unless the small form has a `name`.

    Raises UserError naming file:line, key and fix for each mistake.
    """
    path = recipe_path(reference)
    text = read(path)
    name = text.values.setdefault("name", name_of(path))
    if small:
        changes = read(_existing_small_form(path))
        if isinstance(name, str):
            text.values["name"] = f"{name[:58]}-small"
        text.lay_over(changes)
    for override in overrides:
        text.override(override)
    return validate(Recipe, text.values, text.places)


def _existing_small_form(path: Path) -> Path:
    """Raises UserError when a recipe has no small form."""
    small = small_form(path)
    if small.is_file():
        return small
    with_one = [name for name, file in builtin_recipes().items() if small_form(file).is_file()]
    raise UserError(
        f"{path}: this recipe has no small form: there is no {small}. Write one, with the keys "
        f"that change, or run without --small. Built-in recipes that have one: "
        f"{', '.join(with_one) or 'none'}."
    )


def name_of(path: Path) -> str:
    """A file's name without its ending, in the letters that a recipe's name may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).lstrip("-_")[:64] or "recipe"


S = TypeVar("S", bound=Section)


def validate(kind: type[S], values: Mapping[Any, Any], places: Places | None = None) -> S:
    """A file's content as a section. Raises UserError with a line for each mistake.

    places: where it stands.
    """
    places = places or Places()
    try:
        made = kind.model_validate(values)
    except ValidationError as failure:
        raise UserError(*_lines(places, failure.errors(include_url=False))) from failure
    if isinstance(made, Recipe):
        made.stands_at(places)
    return made


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that loads to an equal Recipe."""
    return yaml.dump(
        recipe.as_written(),
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


# -------------------------------------------------------------------- what pydantic finds wrong


def _lines(places: Places, errors: Iterable[Any]) -> list[str]:
    """A line for each of pydantic's errors, in the order of the file: where, key, rule and fix."""
    found = []
    for error in errors:
        # Where several forms are possible, pydantic names the chosen one in between: <section>.
        at = tuple(step for step in error["loc"] if not str(step).startswith("<"))
        rule, location = _rule(error), places.of(at)
        source, _, line = location.rpartition(":")
        order = (source, int(line)) if line.isdigit() else (location, 0)
        where = ".".join(map(str, at)) or "recipe"
        found.append((order, f"{location}  {where}: {rule}" + ("" if rule.endswith("?") else ".")))
    return list(dict.fromkeys(line for _, line in sorted(found)))


_TOLD = {
    "missing": "is required and missing",
    **dict.fromkeys(
        ["section", "model_type", "dict_type"], "must be a section of `key: value` lines"
    ),
    "list_type": "must be a list, e.g. [a, b]",
    "string_type": "must be a text; put it in quotes",
    "string_pattern_mismatch": "must be made of letters, digits, - and _, and start with a letter "
    "or digit",
    **dict.fromkeys(["int_type", "int_parsing", "int_from_float"], "must be a whole number"),
    "float_parsing": "must be a number",
}
"""pydantic's types of errors whose message is not in the terms of a recipe."""


def _rule(error: Any) -> str:
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return _unknown_key(str(error["loc"][-1]), error["ctx"]["section"])
    rule = _TOLD.get(kind) or error["msg"].removeprefix("Value error, ")
    rule = rule.replace("Input should be", "must be")
    tells = kind in ("missing", "mistake", "unknown_part") or isinstance(given, dict | list)
    return rule if tells else f"{rule} (given: {given!r})"


def _unknown_key(key: str, section: type[Section]) -> str:
    """What to do about a key that a section does not know: one that is written likewise is meant,
    or one whose initials it is, as `lr` is of `learning_rate`."""
    if key in section.gone:
        return f"unknown key. Take it out: {section.gone[key][1]}"
    known = section.known_keys()
    initials = [name for name in known if key == "".join(w[:1] for w in name.split("_"))]
    if nearest := [*difflib.get_close_matches(key, known, n=1), *initials]:
        return f"unknown key. Did you mean `{nearest[0]}`?"
    kind, name, sections = section.siblings()
    if others := [other for other, its in sections.items() if key in its.known_keys()]:
        return (
            f"unknown key. The {kind} {name} has no `{key}`: leave it out, or choose one that has "
            f"({', '.join(others)})"
        )
    return f"unknown key. Known here: {', '.join(k for k in sorted(known) if k != 'kind')}"
