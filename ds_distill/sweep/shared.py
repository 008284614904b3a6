"""Phases that several runs of a sweep have in common run once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_distill.files import new_folder, write_text
from ds_distill.process import failures, lease
from ds_distill.recipe import Recipe, dump_recipe
from ds_distill.recipe.phases import PhaseSettings

ASIDE = {"name", "description", "training", "phases"}
"""Sections of a recipe that earlier phases do not read: what phases take of `training` stands in
them."""

TOLD = {
    *("name", "task", "split", "splits", "teachers", "follow", "models", "save_as", "start"),
    "kind",
}
"""Keys of later phases by which earlier ones find what to make: which examples choose, which caches
are read."""

LINKED = {"models", "cache"}
"""Folders of a run whose files no later phase changes."""


def around_phases(recipe: Recipe) -> str:
    """What must be equal for two recipes to have phases in common, as text."""
    dump = recipe.as_written()
    told = [{key: _dump(phase).get(key) for key in TOLD} for phase in recipe.phases]
    rest = {key: value for key, value in dump.items() if key not in ASIDE}
    return json.dumps([rest, told], sort_keys=True)


def shared_phases(recipes: Sequence[Recipe]) -> int:
    """How many phases, from the first one, the recipes run alike, so that one may run them for all.

    recipes: equal in `around_phases`.
    """
    dumps = [[json.dumps(_dump(phase), sort_keys=True) for phase in r.phases] for r in recipes]
    alike = [len(set(same)) == 1 for same in zip(*dumps, strict=True)]
    return [*alike, False].index(False)


def _dump(phase: PhaseSettings) -> dict[str, Any]:
    return {**phase.as_written(), "kind": phase.kind}


def begin_from(shared: Path, folder: Path, recipe: Recipe) -> None:
    """Make a run's folder in which the phases are done that a run in `shared` did. Models and
    caches are linked, and take no space again."""

    def copy(source: str, target: str) -> None:
        inside = Path(source).relative_to(shared).parts[0]
        try:
            if inside in LINKED:
                os.link(source, target)
                return
        except OSError:  # a file system without links
            pass
        shutil.copy2(source, target)

    left_out = shutil.ignore_patterns(lease.NAME, failures.FOLDER, "recipe.yaml", ".*")
    with new_folder(folder) as aside:
        shutil.copytree(
            shared, aside, copy_function=copy, ignore=left_out, symlinks=True, dirs_exist_ok=True
        )
        write_text(aside / "recipe.yaml", dump_recipe(recipe))
