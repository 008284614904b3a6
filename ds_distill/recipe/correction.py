"""A recipe with mistakes, corrected as their messages propose: so that what else is wrong, by the
rules that look at several keys or phases, is told in the same answer."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from ds_distill.recipe.mistakes import nearest_key, path_of
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.yaml_tree import Items, KeyPath, Keys

ROUNDS = 5
"""Corrected, a section may show other mistakes: a phase whose kind was misspelled."""


@dataclass
class Corrected:
    """What was meant, as far as it can be guessed."""

    errors: list[Any] = field(default_factory=list)
    """pydantic's errors: the first ones, and those that were behind them."""
    recipe: Recipe | None = None
    """None where it is not to be guessed."""
    touched: list[KeyPath] = field(default_factory=list)
    """Where it was corrected."""

    def is_doubtful(self, at: KeyPath) -> bool:
        """Whether what is wrong there may be of a correction's making: one is inside the other."""
        return any(at[: len(other)] == other[: len(at)] for other in self.touched)

    def doubtful_phases(self) -> frozenset[int]:
        """Numbers of the recipe's phases that a correction may make wrong."""
        assert self.recipe is not None
        names = [self.recipe.task_name(phase) for phase in self.recipe.phases]
        doubtful: set[int] = set()
        for at in self.touched:
            match at:
                case ("phases", int(number), *_):
                    doubtful.add(number)
                case ("task",) | ("teachers",) | ("teachers", _):
                    doubtful.update(range(len(names)))
                case ("tasks", task):
                    doubtful.update(number for number, name in enumerate(names) if name == task)
        return frozenset(doubtful)


def corrected(data: Keys, failure: ValidationError) -> Corrected:
    """data: as it was read. failure: what is wrong with it."""
    data = copy.deepcopy(data)
    found = Corrected()
    for _ in range(ROUNDS):
        errors = failure.errors(include_url=False)
        found.errors += [error for error in errors if not found.is_doubtful(path_of(error))]
        try:
            for error in errors:
                # A part of another name would have other keys.
                whole = error["type"] == "unknown_part"
                found.touched.append(path_of(error)[: -1 if whole else None])
                _correct(data, path_of(error), error)
        except LookupError:
            break
        try:
            found.recipe = Recipe.model_validate(data)
        except ValidationError as another:
            failure = another
        else:
            found.recipe.was_read_as(data)
            break
    return found


def _correct(data: Keys, at: KeyPath, error: Any) -> None:
    """Raises LookupError where nothing can be done."""
    if at[:1] == ("phases",) and len(at) <= 2:  # no key with its settings
        raise LookupError
    section: Any = data
    *steps, key = at
    for step in steps:
        if not isinstance(section[step], Keys | Items):  # written short, as the name of a policy
            key = step
            break
        section = section[step]
    if isinstance(section, Items):
        section.drop(int(key))
    elif key not in section and key == at[-1]:
        section[key] = "missing"  # a model, or a path; else the next round finds it wrong
    elif at[0] == "phases" and at[3:] == ("task",) and data.get("tasks"):
        section[key] = next(iter(data["tasks"]))
    else:
        value = section.pop(key)
        if error["type"] == "extra_forbidden":
            meant = nearest_key(str(key), error["ctx"]["section"])
            if meant is not None and meant not in section:
                section[meant] = value
