"""What each phase of a recipe does: a function (settings, number, name, run) -> record.

Begin with `distil`. The phases' sections are in `ds_distill.recipe.phases`, under the same names.
"""
