"""From a YAML file and key=value overrides to a Recipe, with errors that name the line."""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from ds_distill.errors import UserError, did_you_mean
from ds_distill.files import read_text
from ds_distill.recipe.mistakes import lines_of
from ds_distill.recipe.overrides import apply_override, lay_over
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.section import Section
from ds_distill.recipe.yaml_tree import Dumper, Keys, parse


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
    raise UserError(
        f"recipe {reference!r} is neither a file nor a built-in recipe."
        f"{did_you_mean(reference, builtin)} "
        f"Built-in: {', '.join(builtin)}."
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
    data = read(path)
    data.setdefault("name", name_of(path))
    if small:
        changes = read(_existing_small_form(path))
        lay_over(data, changes)
        if "name" not in changes and isinstance(data["name"], str):
            data["name"] = f"{data['name'][:58]}-small"
    for override in overrides:
        apply_override(data, override)
    return validate(Recipe, data)


def read(path: Path) -> Keys:
    """A file of keys. Its name is one, too. Raises UserError for one that cannot be read."""
    try:
        text = read_text(path)
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as a UTF-8 text file: {error}.") from error
    data = parse(text, str(path))
    if not isinstance(data, Keys):
        raise UserError(f"{path}: a recipe is `key: value` lines at the top level.")
    return data


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


def validate(kind: type[S], data: Mapping[Any, Any]) -> S:
    """A file's content as a section. Raises UserError with a line for each mistake."""
    try:
        made = kind.model_validate(data)
    except ValidationError as failure:
        raise UserError(*lines_of(data, failure.errors(include_url=False))) from failure
    if isinstance(made, Recipe) and isinstance(data, Keys):
        made.was_read_as(data)
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
