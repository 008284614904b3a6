"""Keys of a recipe that a resumed run may have otherwise than it began with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.schema import Recipe, Teacher
from ds_distill.recipe.section import Section
from ds_distill.recipe.text import one_line
from ds_distill.recipe.training import Training

STAGES = re.compile(r"zero[0-3]_(\w+)")
"""Built-in DeepSpeed configs. Those of one precision differ in the stage, and so in how weights are
spread over ranks."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs."""

    key: tuple[str, ...]
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.key)} (was {_as_written(self.was)}, now {_as_written(self.now)})"

    def to_json(self) -> dict[str, Any]:
        return {"key": ".".join(self.key), "was": self.was, "now": self.now}

    def is_allowed(self, done: set[int]) -> bool:
        """done: numbers of the phases that have ended, whose settings stay."""
        section: type[Section] = Recipe
        match self.key:
            case ("deepspeed",):
                configs = [STAGES.fullmatch(name) for name in (self.was, self.now)]
                return all(configs) and len({found.group(1) for found in configs if found}) == 1
            case ("teachers", _, name, *_):
                section = Teacher
            case ("training", name, *_):  # what phases take of it stands in them, too
                section = Training
            case ("phases", number, kind, name, *_) if int(number) not in done:
                section = PHASES[kind]
            case (name, *_):
                pass
        return section.may_change(name)


def _as_written(value: Any) -> str:
    line = one_line(value)
    return line if len(line) <= 100 else f"{line[:96]} ..."


def _names(phases: list[dict[str, Any]]) -> list[str]:
    """Of phases as a recipe has them, with their kinds where these are others."""
    found = [(kind, settings["name"]) for phase in phases for kind, settings in phase.items()]
    return [kind if name in (None, kind) else f"{name} ({kind})" for kind, name in found]


def changes(old: Any, new: Any, key: tuple[str, ...] = ()) -> Iterator[Change]:
    """The innermost keys that differ."""
    if key == ("phases",) and (was := _names(old)) != (now := _names(new)):
        yield Change(key, was, now)  # settings of other phases are not compared
    elif isinstance(old, dict) and isinstance(new, dict):
        for inner in {**old, **new}:
            yield from changes(old.get(inner), new.get(inner), (*key, str(inner)))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changes(before, after, (*key, str(index)))
    elif old != new:
        yield Change(key, old, new)
