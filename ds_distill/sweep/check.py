"""What is wrong with the runs of a sweep, before the first of them begins."""

from __future__ import annotations

from collections.abc import Sequence

from ds_distill.check.recipe import check_all, check_settings
from ds_distill.data.docstrings import Progress
from ds_distill.errors import UserError, refuse
from ds_distill.recipe import Recipe
from ds_distill.sweep.runs import SweepRun


def check_runs(runs: Sequence[SweepRun], progress: Progress | None = None) -> list[str]:
    """Notes of the first run. Raises UserError with all that is wrong with it or, where that is
    nothing, with the others: models and data once for those that have the same.

    progress: as of `open_source`.
    """
    first, *others = runs
    notes = check_all(first.recipe, progress)
    checked = {_models_and_data(first.recipe)}
    mistakes: dict[str, list[str]] = {}  # what is wrong -> where
    for run in others:
        read = _models_and_data(run.recipe)
        try:
            if read in checked:
                check_settings(run.recipe)
            else:
                check_all(run.recipe, progress)
        except UserError as error:
            for mistake in error.mistakes:
                mistakes.setdefault(mistake, []).append(" ".join(run.variant.overrides))
        checked.add(read)
    refuse(f"{', '.join(where)}: {what}" for what, where in mistakes.items())
    return notes


def _models_and_data(recipe: Recipe) -> str:
    keys = {"task", "tasks", "data_folder", "teachers", "student", "models_folder"}
    return recipe.model_dump_json(include=keys)
