"""Recipes: the only place where a run is described. Imports no torch.

Begin with `schema`, the keys of a recipe; `load` reads one, `phases`, `tasks`, `terms`, `policies`,
`metrics`, `codecs` and `sources` have the classes of parts (see `part`), `lineage` what each phase
finds.
"""

from ds_distill.recipe.load import (
    builtin_recipes,
    dump_recipe,
    load_recipe,
    recipe_path,
    small_form,
)
from ds_distill.recipe.schema import LONE_TASK, Recipe

__all__ = [
    "LONE_TASK",
    "Recipe",
    "builtin_recipes",
    "dump_recipe",
    "load_recipe",
    "recipe_path",
    "small_form",
]
