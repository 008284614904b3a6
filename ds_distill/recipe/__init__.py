"""Recipes: the only place where a run is described."""

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
