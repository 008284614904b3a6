"""What pydantic finds wrong with a recipe, as a user reads it: file, line, key, rule and fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ds_distill.errors import did_you_mean
from ds_distill.parts.one_of import chosen_by
from ds_distill.parts.registry import KINDS

KeyPath = tuple[str | int, ...]


class Locations(Protocol):
    """Where the keys of a recipe stand."""

    locations: dict[KeyPath, str]

    def location(self, at: KeyPath) -> str:
        """File and line of a key, or of the nearest section around it."""
        ...


def error_lines(tree: Locations, error: Any, shared: Mapping[Any, Any]) -> list[str]:
    """A line for each mistake that one of pydantic's errors tells.

    shared: the section `training`, whose mistakes are reported where they stand and not again for
        each phase that starts from it.
    """
    at, choices = _in_the_file(error["loc"])

    def inherited(key: KeyPath) -> bool:
        in_phase = key[:1] == ("phases",) and len(key) > 3
        return in_phase and key[3] in shared and key not in tree.locations

    if error["type"] == "unknown_keys":
        is_part = bool(error["loc"]) and chosen_by(error["loc"][-1]) is not None
        lines = []
        for key, nearest in error["ctx"]["nearest"].items():
            if inherited((*at, key)):
                continue
            where = ".".join(map(str, (*at, key)))
            hint = _about_unknown_key(key, nearest, error["ctx"], choices if is_part else [])
            lines.append(f"{tree.location((*at, key))}  {where}: unknown key. {hint}")
        return lines
    if error["type"] == "mistake_at":
        at = (*at, *error["ctx"]["key"])
        return [f"{tree.location(at)}  {'.'.join(map(str, at))}: {error['ctx']['what']}."]
    if inherited(at):
        return []
    where = ".".join(map(str, at)) or "recipe"
    if error["type"] == "missing":
        return [f"{tree.location(at)}  {where}: is required and missing."]
    if error["type"] == "unknown_part":
        return [_unknown_part(tree, at, error)]
    given = error["input"]
    shown = f" (given: {given!r})" if not isinstance(given, dict | list) else ""
    return [f"{tree.location(at)}  {where}: {_rule(error)}{shown}."]


def _in_the_file(location: Sequence[str | int]) -> tuple[KeyPath, list[tuple[str, str]]]:
    """An error's location as the file has it, and the parts, (kind, name), that it lies in.

    Where pydantic chose among sections it names the choice in between; of these the file has the
    phases' alone.
    """
    at: list[str | int] = []
    choices = []
    for step in location:
        choice = chosen_by(step)
        if choice is None:
            at.append(step)
            continue
        choices.append(choice)
        if choice[0] == "phase":
            at.append(choice[1])
    return tuple(at), choices


def _about_unknown_key(
    key: str, nearest: Sequence[str], context: Mapping[str, Any], choices: Sequence[tuple[str, str]]
) -> str:
    """What to do about a key that a section does not know.

    choices: the parts whose sections it stands in, as (kind, name), the innermost last.
    """
    if key in context["renamed"]:
        return f"It is called `{nearest[0]}` now."
    kind, name = choices[-1] if choices else ("", "")
    table = next((k.entries for k in KINDS if k.name == kind and k.key is not None), {})
    others = [n for n, e in table.items() if n != name and key in e.settings.known_keys()]
    if nearest:
        return f"Did you mean `{nearest[0]}`?"
    if others:
        return (
            f"The {kind} {name} has no `{key}`: leave it out, or choose one that has "
            f"({', '.join(others)})."
        )
    return f"Known here: {', '.join(k for k in context['known'] if k != 'kind')}."


def _unknown_part(tree: Locations, at: KeyPath, error: Any) -> str:
    """A part's name that is missing, or that no part has."""
    kind, key, known = (error["ctx"][name] for name in ("kind", "key", "known"))
    where, given = ".".join(map(str, at)), error["input"]
    if not isinstance(given, dict):
        return f"{tree.location(at)}  {where}: must be a section of `key: value` lines."
    if key not in given:
        return f"{tree.location(at)}  {where}.{key}: is required and missing."
    name = given[key]
    hint = did_you_mean(str(name), known.split(", ")) or f" Known: {known}."
    location = tree.location((*at, str(name) if kind == "phase" else key))
    where = where if kind == "phase" else f"{where}.{key}"
    return f"{location}  {where}: unknown {kind} {name!r}.{hint}"


def _rule(error: Any) -> str:
    """pydantic's message, in the terms of a recipe."""
    kind = error["type"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a section of `key: value` lines"
    if kind == "list_type":
        return "must be a list, e.g. [a, b]"
    if kind == "string_type":
        return "must be a text; put it in quotes"
    if kind == "string_pattern_mismatch":
        return "must be made of letters, digits, - and _, and start with a letter or digit"
    if kind.startswith("int_"):
        return "must be a whole number"
    if kind == "float_parsing":
        return "must be a number"
    message: str = error["msg"]
    return message.removeprefix("Value error, ").replace("Input should be", "must be")
