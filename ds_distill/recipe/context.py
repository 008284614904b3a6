"""What a phase finds when its turn comes, as far as a recipe tells, for the rules of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_distill.recipe.phases.base import PhaseSettings
    from ds_distill.recipe.phases.cache import Cache
    from ds_distill.recipe.schema import Recipe
    from ds_distill.recipe.tasks import TaskSettings


@dataclass(frozen=True)
class OfTask:
    """What the phases of a task have made of the teachers as they are now."""

    caches: Sequence[tuple[Cache, frozenset[str]]] = ()
    """The cache phases, in order, each with those of its teachers that are as they were."""
    may_be_cached: bool = False
    """Whether an earlier cache phase names no split: any could have been meant."""
    has_expertise: bool = False
    """Whether an expertise phase has run."""
    fitted_states: bool = False
    """Whether the gate of that phase reads the teachers' states."""


@dataclass(frozen=True)
class Context:
    """The recipe, and what the phases before this one have made. A phase with a mistake counts as
    corrected for those after it."""

    recipe: Recipe
    task_name: str
    """The phase's task."""
    location: str
    """Of the part in the recipe, for messages: `phases.NAME`, or `phases.NAME.losses.kl`."""
    models: frozenset[str]
    """Names of models: `student`, the teachers, and what was trained."""
    teachers: Sequence[str] = ()
    """Names of those that teach in the phase."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Of the models that were trained: the task that it was last, whose head they have."""
    of_tasks: Mapping[str, OfTask] = field(default_factory=dict)
    """By task."""

    @staticmethod
    def start(recipe: Recipe) -> Context:
        """Before the first phase."""
        models = frozenset({"student", *recipe.teachers})
        return Context(recipe, next(iter(recipe.tasks_by_name)), "phases", models)

    @property
    def task(self) -> TaskSettings:
        return self.recipe.tasks_by_name[self.task_name]

    @property
    def made(self) -> OfTask:
        """What there is of the phase's task."""
        return self.of_tasks.get(self.task_name, OfTask())

    def held(self, split: str) -> Cache | None:
        """The last cache phase that holds what the phase's teachers say of a split."""
        for cache, teachers in reversed(self.made.caches):
            if split in cache.splits and teachers.issuperset(self.teachers):
                return cache
        return None

    def at(self, location: str) -> Context:
        return replace(self, location=location)

    def before(self, phase: PhaseSettings, location: str) -> Context:
        """What a phase finds."""
        return replace(
            self,
            task_name=self.recipe.task_name(phase),
            location=location,
            teachers=self.recipe.teachers_of(phase),
        )

    def after(self, phase: PhaseSettings) -> Context:
        """What the next phase finds. self: what this one found."""
        from ds_distill.recipe.phases import PHASES, Cache, Expertise

        heads = {**self.heads, **dict.fromkeys(phase.outputs, self.task_name)}
        of_tasks = {name: self._left(made, phase) for name, made in self.of_tasks.items()}
        models = self.models | set(phase.outputs)
        found = replace(self, models=models, heads=heads, of_tasks=of_tasks)
        makes = PHASES[phase.kind].makes
        made = found.made
        if makes == "cache":
            assert isinstance(phase, Cache)
            may_be_cached = made.may_be_cached or not phase.splits
            caches = [*made.caches, (phase, frozenset(self.teachers))]
            made = replace(made, caches=caches, may_be_cached=may_be_cached)
        if makes == "expertise":
            assert isinstance(phase, Expertise)
            held = self.held(phase.split)
            states = phase.states and (held is None or -1 in held.hidden)
            made = replace(made, has_expertise=True, fitted_states=states)
        return replace(found, of_tasks={**found.of_tasks, self.task_name: made})

    def _left(self, made: OfTask, phase: PhaseSettings) -> OfTask:
        """What there is after a phase of what was made of teachers as they were before it."""
        replaced = set(phase.outputs) & self.models
        caches = [(cache, teachers - replaced) for cache, teachers in made.caches]
        if replaced & set(self.recipe.teachers):
            made = OfTask(may_be_cached=made.may_be_cached)
        return replace(made, caches=caches)
