"""What a phase finds when its turn comes, as far as a recipe tells, for the rules of the parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_distill.parts.phases.base import PhaseSettings
    from ds_distill.parts.phases.cache import Cache
    from ds_distill.parts.tasks import MaskedLM, SingleLabel
    from ds_distill.recipe.schema import Recipe


@dataclass(frozen=True)
class Context:
    """The recipe, and what the phases before this one have made. A phase with a mistake counts as
    corrected for those after it."""

    recipe: Recipe
    location: str
    """Of the part in the recipe, for messages: `phases.NAME`, or `phases.NAME.losses.kl`."""
    models: frozenset[str]
    """Names of models: `student`, the teachers, and what was trained."""
    caches: Mapping[str, Cache] = field(default_factory=dict)
    """By split: the cache phase that holds it, of the teachers as they are now."""
    may_be_cached: bool = False
    """Whether an earlier cache phase names no split: any could have been meant."""
    has_expertise: bool = False
    """Whether an expertise phase has run, on the teachers as they are now."""
    fitted_states: bool = False
    """Whether the gate of that phase reads the teachers' states."""

    @staticmethod
    def start(recipe: Recipe) -> Context:
        """Before the first phase."""
        return Context(recipe, "phases", frozenset({"student", *recipe.teachers}))

    @property
    def task(self) -> SingleLabel | MaskedLM:
        return self.recipe.task

    def at(self, location: str) -> Context:
        return replace(self, location=location)

    def after(self, phase: PhaseSettings) -> Context:
        """What the next phase finds."""
        from ds_distill.parts.phases import PHASES, Cache, Expertise

        found = replace(self, models=self.models | set(phase.outputs))
        makes = PHASES[phase.kind].makes
        if set(phase.outputs) & set(phase.starts) & set(self.recipe.teachers):
            found = replace(found, caches={}, has_expertise=False)  # of teachers as they were
        if makes == "cache":
            assert isinstance(phase, Cache)
            caches = {**found.caches, **dict.fromkeys(phase.splits, phase)}
            return replace(
                found, caches=caches, may_be_cached=self.may_be_cached or not phase.splits
            )
        if makes == "expertise":
            assert isinstance(phase, Expertise)
            held = found.caches.get(phase.split)
            states = phase.states and (held is None or -1 in held.hidden)
            return replace(found, has_expertise=True, fitted_states=states)
        return found
