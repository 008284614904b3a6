"""YAML as recipes have it: plain values alone, and the line of each key."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from ds_distill.errors import UserError
from ds_distill.recipe.mistakes import KeyPath

MAX_NODES = 20_000
"""A recipe has some hundred nodes; aliases can multiply a small file into billions."""
MAX_DIGITS = 100
"""Of an integer: of 4,300 Python reads none."""
MAX_DEPTH = 50
"""Of sections in each other: a recipe has about eight. A parse's time grows with its square."""
MAX_LENGTH = 1 << 20
"""Characters of a file. Built-in recipes have some thousand; a parse takes seconds for more."""


class _Loader(yaml.SafeLoader):
    """YAML with the plain values of YAML 1.2's core schema, and no tags.

    PyYAML follows YAML 1.1, where `on`, `yes` and `no` are booleans, 1:30 is 90, 010 is 8,
    1e-5 is a text and 2024-13-01 an exception: all wrong for labels and settings.
    """

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self._source = source
        self._nodes = self._depth = 0

    def get_event(self) -> yaml.Event:
        """The next event. Raises UserError at the first that a recipe cannot have, so that what is
        behind it takes no time."""
        event = super().get_event()
        location = f"{self._source}:{event.start_mark.line + 1 if event.start_mark else 1}"
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise UserError(
                f"{location}: YAML tags are not allowed (found {tag!r}). Write the plain value."
            )
        self._nodes += isinstance(event, yaml.NodeEvent)
        self._depth += isinstance(event, yaml.CollectionStartEvent)
        self._depth -= isinstance(event, yaml.CollectionEndEvent)
        if self._nodes > MAX_NODES:
            raise UserError(f"{location}: a file has at most {MAX_NODES:,} values. Write fewer.")
        if self._depth > MAX_DEPTH:
            raise UserError(
                f"{location}: sections lie too deep in each other: {MAX_DEPTH} are possible. Write "
                "it flat."
            )
        return event


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


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MAX_DIGITS:
        raise yaml.constructor.ConstructorError(
            problem=f"a number of {len(node.value):,} digits", problem_mark=node.start_mark
        )
    return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(re.sub(r"\.(?=inf|nan)", "", node.value.lower())),
)


class Dumper(yaml.SafeDumper):
    """Quotes all that YAML 1.1 or 1.2 would not read as a text."""


for _kind, (_pattern, _first_letters) in _CORE.items():
    Dumper.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first_letters
    )


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks of Unicode as they are and reads them back as spaces.
    style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _represent_text)


class Tree:
    """A parsed YAML document and the location of each of its keys."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.locations: dict[KeyPath, str] = {}
        self._nodes = 0

    def parse(self, text: str) -> Any:
        if len(text) > MAX_LENGTH:
            raise UserError(
                f"{self.source}: {len(text):,} characters, and a file has at most {MAX_LENGTH:,}. "
                "Write data into files of their own."
            )
        try:
            loader = _Loader(text, self.source)
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

    def forget(self, at: KeyPath) -> None:
        """Drop the lines of a key and of all below it."""
        self.locations = {key: line for key, line in self.locations.items() if key[: len(at)] != at}

    def take(self, at: KeyPath, other: Tree, there: KeyPath) -> None:
        """Give a key, and all below it, the lines that another document has them in."""
        self.forget(at)
        self.locations[at] = other.location(there)
        for key, line in other.locations.items():
            if key[: len(there)] == there:
                self.locations[(*at, *key[len(there) :])] = line

    def remove_item(self, items: KeyPath, number: int) -> None:
        """Drop an item of a list; those behind it move up."""
        self.forget((*items, number))
        moved = {}
        depth = len(items)
        for key, line in self.locations.items():
            if key[:depth] == items and len(key) > depth and int(key[depth]) > number:
                key = (*items, int(key[depth]) - 1, *key[depth + 1 :])
            moved[key] = line
        self.locations = moved
