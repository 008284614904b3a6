"""Caches that runs share: what is wrong with one is told before teachers are trained for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from ds_distill.errors import Mistake, UserError
from ds_distill.files import why_unwritable
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.phases import Cache


def shared_cache_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """One for each cache phase whose folder cannot be written, or holds a teacher's signals of
    another max_length. What else they depend on is known when the teachers are trained."""
    for step in steps(recipe):
        phase = step.phase
        if not isinstance(phase, Cache) or phase.is_left_out(recipe.phases[step.number + 1 :]):
            continue
        if phase.shared is not None:
            encoders = [name for name in step.teachers if name not in recipe.from_files]
            length = recipe.task_of(phase).max_length
            for why in _mistakes_of(phase.shared, encoders, length):
                yield Mistake(f"phases.{step.name}.folder={phase.folder}", why)


def _mistakes_of(folder: Path, teachers: Collection[str], max_length: int) -> Iterator[str]:
    if folder.is_dir() and any(folder.iterdir()):
        # Only here: it imports torch, without which `check` takes a third of the time.
        from ds_distill.cache.build import known_teachers
        from ds_distill.cache.format import check_fingerprint

        try:
            known = known_teachers(folder)
            for name in known.keys() & teachers:
                check_fingerprint(folder, name, known[name][0], {"max_length": max_length})
        except UserError as error:
            yield str(error)
            return
        if known:  # it may hold all that is asked for, and is only read then
            return
    if (why := why_unwritable(folder)) is not None:
        yield f"{why}. Name a folder that can be written."
