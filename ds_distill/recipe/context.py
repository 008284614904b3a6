"""What a phase finds when its turn comes, as far as a recipe tells, for the rules of the parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_distill.recipe.lineage import Step
    from ds_distill.recipe.schema import Recipe
    from ds_distill.recipe.tasks import TaskSettings


@dataclass(frozen=True)
class Context:
    """The recipe, and what the phases before this one have made."""

    step: Step
    location: str
    """Of the part in the recipe, for messages: `phases.NAME`, or `phases.NAME.losses.kl`."""

    @property
    def recipe(self) -> Recipe:
        return self.step.recipe

    @property
    def task_name(self) -> str:
        """The phase's task."""
        return self.step.task_name

    @property
    def task(self) -> TaskSettings:
        return self.recipe.tasks_by_name[self.task_name]

    @property
    def teachers(self) -> list[str]:
        """Names of those that teach in the phase."""
        return self.step.teachers

    @property
    def models(self) -> frozenset[str]:
        """Names of models: `student`, the teachers, and what was trained."""
        return frozenset({"student", *self.recipe.teachers, *self.step.found})

    def at(self, location: str) -> Context:
        return replace(self, location=location)
