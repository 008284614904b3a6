"""Keys of a recipe that a resumed run may have otherwise than it began with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.phases.base import TrainingPhase
from ds_distill.recipe.yaml_tree import one_line

ANY_TIME = {"timeout_minutes", "logging", "student_resident"}
"""Sections and keys that change no result."""

STAGES = re.compile(r"zero[0-3]_(\w+)")
"""Built-in DeepSpeed configs. Those of one precision differ in the stage, and so in how weights are
spread over ranks."""

OF_A_PHASE = {"learning_rate", "micro_batch_size", "save_every", "max_grad_norm"}
"""Of a training phase that is not done: for a student that diverged, or memory that ran out."""

OF_INFERENCE = {"batch_size"}
"""Of phases that train nothing: they change what fits in memory."""


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
        if self.key[0] in ANY_TIME:
            return True
        match self.key:
            case ("deepspeed",):
                configs = [STAGES.fullmatch(name) for name in (self.was, self.now)]
                return all(configs) and len({found.group(1) for found in configs if found}) == 1
            case ("teachers", _, "below_majority"):
                return True
            case ("training", name):  # what phases take of it stands in them, too
                return name in OF_A_PHASE
            case ("phases", number, kind, name):
                trains = issubclass(PHASES[kind].settings, TrainingPhase)
                names = OF_A_PHASE if trains else OF_INFERENCE
                return int(number) not in done and name in names
        return False


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
