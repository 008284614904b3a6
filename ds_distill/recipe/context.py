"""What a phase finds when its turn comes, as far as a recipe tells, for the rules of the parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ds_distill.errors import Mistake
from ds_distill.recipe.tasks import TaskSettings


@dataclass(frozen=True)
class Model:
    """A model at one point of a recipe. Without a phase that made it, as the recipe gives it."""

    name: str
    origin: str
    """What it came from: `student` or a teacher, whose configuration it has."""
    made_by: int | None = None
    """Number of the phase that made it."""
    head: str | None = None
    """That phase's task, whose head it has."""
    vocabulary: int | None = None
    """Tokens that a phase has given it or what it came from."""
    expanded: tuple[int, ...] = ()
    """Numbers of the phases that have, in order: models with the same have the same tokens."""
    seen: frozenset[tuple[str, str]] = frozenset()
    """(task, split) of all that it and what it came from were trained on."""
    distilled: bool = False
    """Whether it is a student of teachers, or one that went on without them on the same task."""


@dataclass(frozen=True)
class Context:
    """The phase's task, and what the phases before this one have made."""

    location: str
    """Of the part in the recipe, for messages: `phases.NAME`, or `phases.NAME.losses.kl`."""
    task_name: str
    task: TaskSettings
    teachers: Sequence[str]
    """Names of those that teach in the phase."""
    given: Sequence[str]
    """Names of the recipe's teachers."""
    found: Mapping[str, Model]
    """By name: the models that the phases before have made."""
    phase_names: Sequence[str]
    """Of the recipe."""

    @property
    def models(self) -> frozenset[str]:
        """Names of models: `student`, the teachers, and what was trained."""
        return frozenset({"student", *self.given, *self.found})

    def model(self, name: str) -> Model:
        """What the phase finds under a name; without a mistake in the recipe there is one."""
        return self.found.get(name, Model(name, name))

    def unknown(self, key: str, names: Iterable[str], but: Iterable[str] = ()) -> Iterator[Mistake]:
        """Of models that a key of the phase names, those that are not there. but: models that
        cannot be meant."""
        there = sorted(self.models - {*but})
        for name in names:
            if name not in there:
                known = ", ".join(there) or "none"
                what = f"no model {name!r} before this phase. There are: {known}."
                yield Mistake(f"{self.location}.{key}", what)

    def at(self, location: str) -> Self:
        return replace(self, location=location)
