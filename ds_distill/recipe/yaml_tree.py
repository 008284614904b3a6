"""YAML as recipes have it: plain values alone, and where each key stands."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from ds_distill.errors import UserError

KeyPath = tuple[str | int, ...]

MAX_NODES = 20_000
"""A recipe has some hundred nodes; aliases can multiply a small file into billions."""
MAX_DIGITS = 100
"""Of an integer: of 4,300 Python reads none."""
MAX_DEPTH = 50
"""Of sections in each other: a recipe has about eight. A parse's time grows with its square."""
MAX_LENGTH = 1 << 20
"""Characters of a file. Built-in recipes have some thousand; a parse takes seconds for more."""


class Keys(dict[Any, Any]):
    """A section as it was read."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self.location = location
        """File and line."""
        self.locations: dict[Any, str] = {}
        """Of its keys, and of those that were taken out."""


class Items(list[Any]):
    """A list as it was read."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self.location = location
        self.locations: list[str] = []
        """Of its items."""

    def drop(self, number: int) -> None:
        """Take an item out."""
        del self[number], self.locations[number]


def location_of(data: Any, at: KeyPath) -> str:
    """Where a key stands: its own line, or that of the nearest section around it."""
    location: str = getattr(data, "location", "recipe")
    for step in at:
        match data, step:
            case Keys(), _ if step in data.locations:
                location, data = data.locations[step], data.get(step)
            case Items(), int() if step < len(data):
                location, data = data.locations[step], data[step]
            case _:
                break
    return location


def parse(text: str, source: str, *, lines: bool = True) -> Any:
    """Plain values in `Keys` and `Items`. Raises UserError that names the line.

    source: the file, or what else messages call it. lines: whether they name lines of it.
    """
    if len(text) > MAX_LENGTH:
        raise UserError(
            f"{source}: {len(text):,} characters, and a file has at most {MAX_LENGTH:,}. "
            "Write data into files of their own."
        )
    try:
        loader = _Loader(text, source, lines)
        try:
            node = loader.get_single_node()
            return None if node is None else loader.value_of(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise UserError(
            f"{source}: sections lie too deep in each other, or an alias (*name) stands "
            "inside what it names. Write it flat."
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(
            f"{source}{line}: not readable as YAML: {problem}. Correct that line; put a "
            "text with special characters in quotes."
        ) from error


class _Loader(yaml.SafeLoader):
    """YAML with the plain values of YAML 1.2's core schema, and no tags.

    PyYAML follows YAML 1.1, where `on`, `yes` and `no` are booleans, 1:30 is 90, 010 is 8,
    1e-5 is a text and 2024-13-01 an exception: all wrong for labels and settings.
    """

    def __init__(self, text: str, source: str, lines: bool) -> None:
        super().__init__(text)
        self._source, self._lines = source, lines
        self._nodes = self._depth = self._values = 0

    def _location(self, mark: yaml.Mark | None) -> str:
        return f"{self._source}:{mark.line + 1}" if self._lines and mark else self._source

    def get_event(self) -> yaml.Event:
        """The next event. Raises UserError at the first that a recipe cannot have, so that what is
        behind it takes no time."""
        event = super().get_event()
        location = self._location(event.start_mark)
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

    def value_of(self, node: yaml.Node) -> Any:
        """A node's value, with the locations of what is in it."""
        self._values += 1
        location = self._location(node.start_mark)
        if self._values > MAX_NODES:
            raise UserError(
                f"{location}: the recipe grows beyond {MAX_NODES} values; "
                "aliases (*name) repeat too much. Write it without nested aliases."
            )
        if isinstance(node, yaml.MappingNode):
            return self._keys(node, location)
        if isinstance(node, yaml.SequenceNode):
            items = Items(location)
            for item in node.value:
                items.append(self.value_of(item))
                items.locations.append(self._location(item.start_mark))
            return items
        value = self.construct_object(node)
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UserError(
                f"{location}: {value!r} holds a byte or half of a character that is no "
                "UTF-8. Write it in UTF-8."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{location}: {node.value} is no number. Write a finite one.")
        return value

    def _keys(self, node: yaml.MappingNode, location: str) -> Keys:
        keys = Keys(location)
        for key_node, value_node in node.value:
            key, where = self.construct_object(key_node), self._location(key_node.start_mark)
            if not isinstance(key, str | int):
                raise UserError(f"{where}: a key must be a word, got {key!r}.")
            if key in keys:
                raise UserError(
                    f"{where}: key {key!r} stands twice in one section. Keep one of them."
                )
            keys[key], keys.locations[key] = self.value_of(value_node), where
        return keys


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


class _LineDumper(Dumper):
    """Escapes line breaks."""


_LineDumper.add_representer(
    str,
    lambda dumper, text: (
        dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
        if "\n" in text
        else _represent_text(dumper, text)
    ),
)


def one_line(value: Any) -> str:
    """A value as a recipe or an override has it, on one line."""
    shown: str = yaml.dump(
        value,
        Dumper=_LineDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
    )
    return shown.removesuffix("\n").removesuffix("\n...")
