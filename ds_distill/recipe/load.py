"""From a YAML file and key=value overrides to a Recipe, with errors that name the line."""

from __future__ import annotations

import importlib.resources
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ds_distill.errors import UserError, did_you_mean
from ds_distill.recipe.mistakes import KeyPath, error_lines
from ds_distill.recipe.schema import Recipe

MAX_NODES = 20_000
"""A recipe has some hundred nodes; aliases can multiply a small file into billions."""


class _Loader(yaml.SafeLoader):
    """YAML with the plain values of YAML 1.2's core schema, and no tags.

    PyYAML follows YAML 1.1, where `on`, `yes` and `no` are booleans, 1:30 is 90, 010 is 8,
    1e-5 is a text and 2024-13-01 an exception: all wrong for labels and settings.
    """


_CORE = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
_Loader.yaml_implicit_resolvers = {}
for _kind, (_pattern, _first_letters) in _CORE.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first_letters
    )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(re.sub(r"\.(?=inf|nan)", "", node.value.lower())),
)


class _Dumper(yaml.SafeDumper):
    """Quotes all that YAML 1.1 or 1.2 would not read as a text."""


for _kind, (_pattern, _first_letters) in _CORE.items():
    _Dumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first_letters
    )


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks of Unicode as they are and reads them back as spaces.
    style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


class _Tree:
    """A parsed YAML document and the location of each of its keys."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.locations: dict[KeyPath, str] = {}
        self._nodes = 0

    def parse(self, text: str) -> Any:
        try:
            for event in yaml.parse(text, Loader=_Loader):
                tag = getattr(event, "tag", None)
                if tag not in (None, "!"):
                    number = event.start_mark.line + 1 if event.start_mark else 1
                    raise UserError(
                        f"{self.source}:{number}: YAML tags are not allowed (found {tag!r}). "
                        "Write the plain value."
                    )
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
                return None if node is None else self._build(loader, node, ())
            finally:
                loader.dispose()
        except RecursionError as error:
            raise UserError(
                f"{self.source}: sections lie too deep in each other, or an alias (*name) stands "
                "inside what it names. Write it flat."
            ) from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise UserError(
                f"{self.source}{line}: not readable as YAML: {problem}. Correct that line; put a "
                "text with special characters in quotes."
            ) from error

    def _build(self, loader: _Loader, node: yaml.Node, at: KeyPath) -> Any:
        self._nodes += 1
        line = node.start_mark.line + 1
        self.locations.setdefault(at, f"{self.source}:{line}")
        if self._nodes > MAX_NODES:
            raise UserError(
                f"{self.source}:{line}: the recipe grows beyond {MAX_NODES} values; "
                "aliases (*name) repeat too much. Write it without nested aliases."
            )
        if isinstance(node, yaml.MappingNode):
            result: dict[Any, Any] = {}
            for key_node, value_node in node.value:
                key = loader.construct_object(key_node)
                key_line = key_node.start_mark.line + 1
                if not isinstance(key, str | int):
                    raise UserError(f"{self.source}:{key_line}: a key must be a word, got {key!r}.")
                if key in result:
                    raise UserError(
                        f"{self.source}:{key_line}: key {key!r} stands twice in one section. "
                        "Keep one of them."
                    )
                self.locations[(*at, key)] = f"{self.source}:{key_line}"
                result[key] = self._build(loader, value_node, (*at, key))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [
                self._build(loader, item, (*at, index)) for index, item in enumerate(node.value)
            ]
        value = loader.construct_object(node)
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UserError(
                f"{self.source}:{line}: {value!r} holds a byte or half of a character that is no "
                "UTF-8. Write it in UTF-8."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{self.source}:{line}: {node.value} is no number. Write a finite one.")
        return value

    def location(self, at: KeyPath) -> str:
        """Where a location stands: its own line, or that of the nearest section around it."""
        while at and at not in self.locations:
            at = at[:-1]
        return self.locations.get(at, self.source)


def builtin_recipes() -> dict[str, Path]:
    """Names and files of the recipes that come with the package."""
    folder = Path(str(importlib.resources.files("ds_configs"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_path(reference: str | Path) -> Path:
    """The file of a recipe given as a path or as a built-in's name.

    Raises UserError when it is neither.
    """
    path = Path(reference)
    if path.is_file():
        return path
    reference, builtin = str(reference), builtin_recipes()
    if reference in builtin:
        return builtin[reference]
    raise UserError(
        f"recipe {reference!r} is neither a file nor a built-in recipe."
        f"{did_you_mean(reference, builtin)} "
        f"Built-in: {', '.join(builtin)}."
    )


def load_recipe(reference: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe (file or built-in name) and apply `key=value` overrides.

    Keys are dotted (`task.data.path`); a phase is addressed by its name, kind or number
    (`phases.distil.epochs=1`). Values are read as YAML. A recipe without `name` is called as its
    file.

    Raises UserError naming file:line, key and fix for each mistake.
    """
    path = recipe_path(reference)
    tree = _Tree(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as a UTF-8 text file: {error}.") from error
    data = tree.parse(text)
    if not isinstance(data, dict):
        raise UserError(f"{path}: a recipe is `key: value` lines at the top level.")
    for override in overrides:
        _apply_override(tree, data, override)
    return _validate(tree, {"name": _name_of(path), **data})


def _name_of(path: Path) -> str:
    """A file's name without its ending, in the letters that a recipe's name may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).lstrip("-_")[:64] or "recipe"


def _apply_override(tree: _Tree, data: dict[Any, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override {override!r} is not of the form key=value, e.g. training.epochs=1."
        )
    location = f"command line {override!r}"
    parsed = _Tree(location).parse(value)
    target: Any = data
    at: KeyPath = ()
    parts = key.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        step: str | int = part
        if isinstance(target, list):
            step = _list_index(target, part, location)
            if at == ("phases",) and not last:
                kind, body = _phase(tree, step, target[step])
                target[step] = {kind: body}
                if parts[depth + 1] == kind and depth + 2 < len(parts):
                    parts.pop(depth + 1)  # as messages write it: phases.0.fine-tune.epochs
                    last = depth == len(parts) - 1
                at, target = (*at, step, kind), target[step][kind]
                continue
        elif not isinstance(target, dict):
            raise UserError(f"{location}: {'.'.join(map(str, at))} holds a value, not a section.")
        at = (*at, step)
        if last:
            target[step] = parsed
            tree.locations = {old: p for old, p in tree.locations.items() if old[: len(at)] != at}
            tree.locations[at] = location
        else:
            if isinstance(target, dict) and target.get(step) is None:
                target[step] = {}
                tree.locations[at] = location
            target = target[step]


def _list_index(items: list[Any], part: str, location: str) -> int:
    """A list's item by number, or a phase by its name or kind."""
    if part.isdigit() and int(part) < len(items):
        return int(part)
    names: list[str] = []
    for item in items:
        [(kind, body)] = item.items() if isinstance(item, dict) and len(item) == 1 else [(item, {})]
        names.append((isinstance(body, dict) and body.get("name")) or str(kind))
    if names.count(part) == 1:
        return names.index(part)
    if part in names:
        numbers = [str(number) for number, name in enumerate(names) if name == part]
        raise UserError(
            f"{location}: {part!r} names several items; use a number: {' or '.join(numbers)}."
        )
    raise UserError(f"{location}: no item {part!r} in the list. It has: {', '.join(names)}.")


def _phase(tree: _Tree, number: str | int, item: Any) -> tuple[str | int, Any]:
    """(kind, settings) of an item of `phases`. Raises UserError when it is not one key."""
    if isinstance(item, str):
        return item, {}
    if isinstance(item, dict) and len(item) == 1:
        [(kind, body)] = item.items()
        if body is None or isinstance(body, dict):
            return kind, body or {}
    raise UserError(
        f"{tree.location(('phases', number))}  phases.{number}: a phase is one key with its "
        "settings, e.g. - evaluate: {split: test}."
    )


def _validate(tree: _Tree, data: Mapping[Any, Any]) -> Recipe:
    phases = data.get("phases")
    for number, item in enumerate(phases if isinstance(phases, list) else []):
        _phase(tree, number, item)
    try:
        return Recipe.model_validate(data)
    except ValidationError as failure:
        seen: dict[str, None] = {}
        if "task" not in data and "tasks" not in data:  # a rule of two keys, so it comes too late
            seen[f"{tree.location(('task',))}  task: is required and missing."] = None
        shared = data.get("training")
        for error in failure.errors():
            for line in error_lines(tree, error, shared if isinstance(shared, dict) else {}):
                seen[line] = None  # one line per mistake, once
        count = f"{len(seen)} error{'s' if len(seen) > 1 else ''}. Nothing was started."
        raise UserError("\n".join([*seen, count])) from failure


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that loads to an equal Recipe."""
    return yaml.dump(
        recipe.model_dump(mode="json"),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
