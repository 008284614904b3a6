"""What is wrong with the runs of a sweep, before the first of them begins."""

from __future__ import annotations

from collections.abc import Mapping

from ds_distill.check.check import check_all, check_settings, open_sources
from ds_distill.data.sources import Progress
from ds_distill.errors import Mistake, UserError, refuse
from ds_distill.recipe import Recipe

_MODELS_AND_DATA = {"task", "tasks", "data_folder", "teachers", "student", "models_folder"}


def check_runs(
    runs: Mapping[str, Recipe], progress: Progress | None = None, *, chooses: bool = False
) -> list[str]:
    """Notes. Raises UserError with all that is wrong: models and data are looked at once for runs
    that have the same.

    runs: by what a message calls them; "" for one that needs no name.
    progress: as of `open_source`.
    chooses: a setting is chosen on the split validation, which must be there.
    """
    notes: dict[str, list[str]] = {}  # what there is to say -> of which runs
    mistakes: list[Mistake] = []
    checked = set[str]()
    for name, recipe in runs.items():
        read = recipe.model_dump_json(include=_MODELS_AND_DATA)
        try:
            if read in checked:
                check_settings(recipe)
                continue
            checked.add(read)
            for note in check_all(recipe, progress):
                notes.setdefault(note, []).append(name)
            if chooses:
                _check_validation(recipe)
        except UserError as error:
            mistakes += (Mistake(name, str(mistake)) for mistake in error.mistakes)
    refuse(mistakes)
    found = notes.items()
    return [what if "" in where else f"{', '.join(where)}: {what}" for what, where in found]


def _check_validation(recipe: Recipe) -> None:
    for name, source in open_sources(recipe).items():
        if "validation" not in source.splits:
            raise UserError(
                f"its data {recipe.tasks_by_name[name].data.path} have no split 'validation', on "
                "which a setting is chosen, because the test split must not choose. Say where it "
                "is with data.splits.validation."
            )
