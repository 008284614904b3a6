"""A recipe as text: the plain values of a YAML file, where each stands, and what is laid over them:
small forms and `key=value` overrides."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from ds_distill.errors import UserError
from ds_distill.files import read_text

KeyPath = tuple[str | int, ...]

MAX_VALUES = 20_000
"""A recipe has some hundred; aliases can multiply a small file into billions."""
MAX_LENGTH = 1 << 20
"""Characters of a file. Built-in recipes have some thousand; a parse takes seconds for more."""


class Places(dict[KeyPath, str]):
    """Where keys stand, by their paths: file and line, or the override. Those that were taken out
    have one, too. All are equal: so are recipes that say the same in other files."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)

    __hash__ = None

    def of(self, at: KeyPath) -> str:
        """Of a key, or of the nearest section around it."""
        while at and at not in self:
            at = at[:-1]
        return self.get(at, "recipe")


@dataclass
class Text:
    """A file of keys, or what stands under one."""

    values: Any
    places: Places

    def at(self, path: KeyPath) -> Any:
        """What stands there; None for nothing."""

        def below(value: Any, step: str | int) -> Any:
            return value.get(step) if isinstance(value, dict) else value[step]

        return reduce(below, path, self.values)

    def below(self, path: KeyPath) -> Text:
        """What stands there."""
        inside = {
            p[len(path) :]: where for p, where in self.places.items() if p[: len(path)] == path
        }
        return Text(self.at(path), Places(inside))

    def put(self, path: KeyPath, text: Text) -> None:
        for inside in self.below(path).places:
            del self.places[*path, *inside]
        self.at(path[:-1])[path[-1]] = text.values
        self.places |= {(*path, *inside): where for inside, where in text.places.items()}

    def override(self, change: str) -> None:
        """Set `key=value`, whose value is YAML."""
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise UserError(
                f"override {change!r} is not of the form key=value, e.g. training.epochs=1."
            )
        location = f"command line {change!r}"
        new = parse(value, location, lines=False)
        self.put(self._address(key.split("."), location), new)

    def _address(self, steps: Sequence[str | int], location: str) -> KeyPath:
        """The path of a key, with a phase by its name, kind or number. A section on the way that is
        not there is made."""
        at: KeyPath = ()
        while True:
            step, *steps = steps
            match above := self.at(at):
                case list():
                    at = (*at, number_of(above, str(step), location))
                case dict():
                    at = (*at, step)
                case _:
                    held = ".".join(map(str, at))
                    raise UserError(f"{location}: {held} holds a value, not a section.")
            if not steps:
                return at
            if at[0] == "phases" and len(at) == 2 and isinstance(above, list):
                at = (*at, self._kind(at))
                if steps[0] == at[-1] and len(steps) > 1:
                    steps = steps[1:]  # as messages write it: phases.0.fine-tune.epochs
            elif self.at(at) is None:
                self.put(at, Text({}, Places({(): location})))

    def _kind(self, at: KeyPath) -> str:
        """That of a phase, which from now on is one key with its settings."""
        location = self.places.of(at)
        try:
            kind, body = one_key(self.at(at))
        except ValueError as error:
            raise UserError(f"{location}  {at[0]}.{at[1]}: {error}.") from error
        if not body:
            self.put(at, Text({kind: {}}, Places({(): location, (kind,): location})))
        return kind

    def lay_over(self, changes: Text, at: KeyPath = ()) -> None:
        """Merge an overlay.

        A section goes over a section key by key, `phases: {NAME: {...}}` over the phase of that
        name, kind or number. null removes a key, or a phase. Anything else replaces what is there;
        so does a section where the recipe has none.

        at: the section of the changes that is meant.

        Raises UserError for a key that null cannot remove, and for an unknown phase.
        """
        left_out: list[int] = []
        for key, value in changes.at(at).items():
            change = changes.below((*at, key))
            location = change.places[()]
            here = self._address((*at, key), location)
            goes_over = dict | list if here == ("phases",) else dict
            match here:
                case ("phases", int(number)):
                    if value is None:
                        left_out.append(number)
                    elif isinstance(value, dict):
                        self.lay_over(changes, (*at, key))
                    else:
                        raise UserError(
                            f"{location}  phases.{key}: must be a section with the settings that "
                            "change, or null to leave the phase out."
                        )
                case _ if isinstance(value, dict) and isinstance(self.at(here), goes_over):
                    self.lay_over(changes, (*at, key))
                case (*above, last) if value is None:
                    if last not in self.at(tuple(above)):
                        raise UserError(
                            f"{location}  {'.'.join(map(str, here))}: null removes a key, but the "
                            "recipe has no such key here. Leave the line out."
                        )
                    self.put(here, change)  # should it be required, its location is told
                    del self.at(tuple(above))[last]
                case _:
                    self.put(here, change)
        for number in sorted(left_out, reverse=True):
            self._leave_out(number)

    def _leave_out(self, phase: int) -> None:
        phases = self.at(("phases",))
        for number in range(phase, len(phases) - 1):
            self.put(("phases", number), self.below(("phases", number + 1)))
        del phases[-1]


def one_key(item: Any) -> tuple[str, Any]:
    """(kind, settings) of an item of `phases`; the kind alone has none. Raises ValueError."""
    if isinstance(item, str):
        return item, {}
    if isinstance(item, dict) and len(item) == 1:
        [(kind, body)] = item.items()
        if body is None or isinstance(body, dict):
            return str(kind), body or {}
    raise ValueError("a phase is one key with its settings, e.g. - evaluate: {split: test}")


def number_of(items: list[Any], name: str, location: str) -> int:
    """A list's item by number, or a phase by its name or kind."""
    if name.isdigit() and int(name) < len(items):
        return int(name)
    names: list[str] = []
    for item in items:
        [(kind, body)] = item.items() if isinstance(item, dict) and len(item) == 1 else [(item, {})]
        names.append(str((isinstance(body, dict) and body.get("name")) or kind))
    if names.count(name) == 1:
        return names.index(name)
    if name in names:
        numbers = " or ".join(str(number) for number, one in enumerate(names) if one == name)
        raise UserError(f"{location}: {name!r} names several items; use a number: {numbers}.")
    raise UserError(f"{location}: no item {name!r} in the list. It has: {', '.join(names)}.")


# ------------------------------------------------------------------------------------------ YAML


def read(path: Path) -> Text:
    """Raises UserError for a file that cannot be read, or holds no keys."""
    try:
        text = read_text(path)
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as a UTF-8 text file: {error}.") from error
    found = parse(text, str(path))
    if not isinstance(found.values, dict):
        raise UserError(f"{path}: a recipe is `key: value` lines at the top level.")
    return found


def parse(text: str, source: str, *, lines: bool = True) -> Text:
    """Plain values, and where each stands. Raises UserError that names the line.

    source: the file, or what else messages call it. lines: whether they name lines of it.
    """
    if len(text) > MAX_LENGTH:
        raise UserError(
            f"{source}: {len(text):,} characters, and a file has at most {MAX_LENGTH:,}. "
            "Write data into files of their own."
        )
    try:
        return _Loader(text, source, lines).whole()
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
    """YAML with the plain values of YAML 1.2's core schema.

    PyYAML follows YAML 1.1, where `on`, `yes` and `no` are booleans, 1:30 is 90, 010 is 8,
    1e-5 is a text and 2024-13-01 an exception: all wrong for labels and settings. Numbers that are
    not finite are texts: no setting takes one.
    """

    def __init__(self, text: str, source: str, lines: bool) -> None:
        super().__init__(text)
        self._source, self._lines = source, lines
        self._places = Places()

    def whole(self) -> Text:
        node = self.get_single_node()
        value = None if node is None else self._value(node, (), node.start_mark)
        return Text(value, self._places or Places({(): self._source}))

    def _location(self, mark: yaml.Mark) -> str:
        return f"{self._source}:{mark.line + 1}" if self._lines else self._source

    def _value(self, node: yaml.Node, at: KeyPath, mark: yaml.Mark) -> Any:
        """mark: where its key stands."""
        self._places[at] = location = self._location(mark)
        if len(self._places) > MAX_VALUES:
            raise UserError(
                f"{location}: the recipe grows beyond {MAX_VALUES} values; aliases (*name) may "
                "repeat too much. Write fewer."
            )
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self._value(item, (*at, number), item.start_mark) for number, item in items]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node)
        found: dict[Any, Any] = {}
        for name, value in node.value:
            key, location = self._scalar(name), self._location(name.start_mark)
            if not isinstance(key, str | int):
                raise UserError(f"{location}: a key must be a word, got {key!r}.")
            if key in found:
                raise UserError(
                    f"{location}: key {key!r} stands twice in one section. Keep one of them."
                )
            found[key] = self._value(value, (*at, key), name.start_mark)
        return found

    def _scalar(self, node: yaml.Node) -> Any:
        if node.tag == self.DEFAULT_SCALAR_TAG:
            return node.value
        if node.tag in _VALUE_OF:
            return _VALUE_OF[node.tag](node.value)
        raise UserError(
            f"{self._location(node.start_mark)}: YAML tags are not allowed (found {node.tag!r}). "
            "Write the plain value."
        )


class Dumper(yaml.SafeDumper):
    """Quotes all that YAML 1.1 or 1.2 would not read as a text."""


_Loader.yaml_implicit_resolvers = {}
_VALUE_OF: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text in ("true", "True", "TRUE"),
    "int": int,
    "float": float,
}
for _kind, _pattern, _first_letters in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,100}", list("-+0123456789")),  # of 4,300 digits Python reads none
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    for _either in (_Loader, Dumper):
        _either.add_implicit_resolver(_kind, re.compile(f"^(?:{_pattern})$"), _first_letters)


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks of Unicode as they are and reads them back as spaces.
    style = '"' if re.search("[\n\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _represent_text)


def one_line(value: Any) -> str:
    """A value as a recipe or an override has it, on one line."""
    shown: str = yaml.dump(
        value,
        Dumper=Dumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
    )
    return shown.removesuffix("\n").removesuffix("\n...")
