"""What pydantic finds wrong with a recipe, as a user reads it: file, line, key, rule and fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from ds_distill.recipe.section import Section
from ds_distill.recipe.yaml_tree import KeyPath, location_of


def lines_of(data: Any, errors: Iterable[Any]) -> list[str]:
    """A line for each mistake, in the order of the file.

    data: what was validated, as it was read. errors: pydantic's.
    """
    found = []
    for error in errors:
        at = path_of(error)
        where = ".".join(map(str, at)) or "recipe"
        rule, location = _rule(error), location_of(data, at)
        source, _, line = location.rpartition(":")
        order = (source, int(line)) if line.isdigit() else (location, 0)
        found.append((order, f"{location}  {where}: {rule}" + ("" if rule.endswith("?") else ".")))
    return list(dict.fromkeys(line for _, line in sorted(found)))


def path_of(error: Any) -> KeyPath:
    """The key that one of pydantic's errors is about. Where several forms are possible, pydantic
    names the chosen one in between: <section>."""
    return tuple(step for step in error["loc"] if not str(step).startswith("<"))


TOLD = {
    "missing": "is required and missing",
    "section": "must be a section of `key: value` lines",
    "model_type": "must be a section of `key: value` lines",
    "dict_type": "must be a section of `key: value` lines",
    "list_type": "must be a list, e.g. [a, b]",
    "string_type": "must be a text; put it in quotes",
    "string_pattern_mismatch": "must be made of letters, digits, - and _, and start with a letter "
    "or digit",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
}
"""pydantic's types of errors whose message is not in the terms of a recipe."""


def _rule(error: Any) -> str:
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return _unknown_key(str(error["loc"][-1]), error["ctx"]["section"])
    rule = TOLD.get(kind) or error["msg"].removeprefix("Value error, ")
    rule = rule.replace("Input should be", "must be")
    tells = kind in ("missing", "mistake", "unknown_part") or isinstance(given, dict | list)
    return rule if tells else f"{rule} (given: {given!r})"


def _unknown_key(key: str, section: Any) -> str:
    """What to do about a key that a section does not know."""
    known = section.known_keys()
    nearest = nearest_key(key, section)
    if key in section.gone:
        return f"unknown key. Take it out: {section.gone[key][1]}"
    if key in section.renamed:
        return f"unknown key. It is called `{nearest}` now"
    if nearest is not None:
        return f"unknown key. Did you mean `{nearest}`?"
    kind, name, sections = section.siblings()
    if others := [other for other, its in sections.items() if key in its.known_keys()]:
        return (
            f"unknown key. The {kind} {name} has no `{key}`: leave it out, or choose one that has "
            f"({', '.join(others)})"
        )
    return f"unknown key. Known here: {', '.join(k for k in sorted(known) if k != 'kind')}"


def nearest_key(key: str, section: type[Section]) -> str | None:
    """The key of a section that is meant by one it does not know: what that is called now, one that
    is written likewise, or whose initials it is, as `lr` is of `learning_rate`."""
    if key in section.renamed:
        return section.renamed[key]
    known = section.known_keys()
    close = difflib.get_close_matches(key, known, n=1)
    initials = (name for name in known if key == "".join(w[:1] for w in name.split("_")))
    return next(iter(close), None) or next(initials, None)
