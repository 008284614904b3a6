"""What each phase of a recipe finds: the models, what each came from and which phase made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_distill.recipe.phases.base import PhaseSettings
from ds_distill.recipe.schema import Recipe


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
    seen: frozenset[tuple[str, str]] = frozenset()
    """(task, split) of all that it and what it came from were trained on."""


@dataclass(frozen=True)
class Step:
    """A phase when its turn comes."""

    number: int
    name: str
    phase: PhaseSettings
    task_name: str
    teachers: Sequence[str]
    """Names of the models that teach in it."""
    found: Mapping[str, Model]
    """By name: the models that phases before it have made."""

    def model(self, name: str) -> Model:
        """What it finds under a name; without a mistake in the recipe there is one."""
        return self.found.get(name, Model(name, name))

    def left(self) -> dict[str, Model]:
        """By name: the models that phases up to this one have made."""
        return {**self.found, **{output: self._made(output) for output in self.phase.outputs}}

    def _made(self, output: str) -> Model:
        phase = self.phase
        names = phase.starts
        if len(names) == len(phase.outputs):
            names = [phase.start_of(output)]
        starts = [self.model(name) for name in names] or [Model(output, output)]
        learnt = frozenset((self.task_name, split) for split in phase.learns_from)
        return Model(
            output,
            starts[0].origin,
            self.number,
            self.task_name,
            phase.vocabulary or starts[0].vocabulary,
            learnt.union(*(start.seen for start in starts)),
        )


def steps(recipe: Recipe) -> list[Step]:
    """Of each phase, in order."""
    found: list[Step] = []
    for number, (name, phase) in enumerate(zip(recipe.phase_names(), recipe.phases, strict=True)):
        models = found[-1].left() if found else {}
        task, teachers = recipe.task_name(phase), recipe.teachers_of(phase)
        found.append(Step(number, name, phase, task, teachers, models))
    return found


def model_at(recipe: Recipe, name: str, number: int) -> Model:
    """The model `name` as phase `number` finds it; as all leave it, where there are no more."""
    before = steps(recipe)[:number]
    return (before[-1].left() if before else {}).get(name, Model(name, name))


def trained_on(recipe: Recipe, task: str, split: str) -> list[str]:
    """Names of the models that a phase trains on a task's split, and of those that start from
    one."""
    made = steps(recipe)[-1].left().values()
    return [model.name for model in made if (task, split) in model.seen]
