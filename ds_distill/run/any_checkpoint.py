"""The recipe that evaluates a checkpoint of any origin on a task."""

from __future__ import annotations

from typing import Any

from ds_distill.check.check import open_sources
from ds_distill.errors import UserError, did_you_mean
from ds_distill.models.configuration import check_head, load_config
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tasks import TASKS

CHECKPOINT = "checkpoint"
"""Name of the model in the recipe, and its role in the evaluation."""

KEPT = ("seed", "padding", "models_folder", "data_folder")
"""What an evaluation takes of the recipe beside its task."""


def evaluation_recipe(recipe: Recipe, task: str | None, checkpoint: str, split: str) -> Recipe:
    """One evaluate phase of a recipe's task, with a checkpoint as the only model.

    task: its name, where the recipe has several.

    Raises UserError for a task or split that is not there, and for a checkpoint without a head of
    the task.
    """
    name = _task_name(recipe, task)
    settings, whole = recipe.tasks_by_name[name], recipe.model_dump(mode="json")
    reference = resolve_model(checkpoint, recipe.models_folder)
    check_head(checkpoint, load_config(reference), TASKS[settings.type])
    data: dict[str, Any] = {
        **{key: whole[key] for key in KEPT},
        "name": recipe.name,
        "description": f"{checkpoint} on the task of {recipe.name}.",
        "task": whole["tasks"].get(name, whole["task"]),
        "teachers": {CHECKPOINT: {"model": checkpoint}},
        "student": {"model": checkpoint},
        "phases": [{"evaluate": {"split": split}}],
        "deepspeed": "zero0_fp32",
    }
    made = validate(Recipe, data)
    [source] = open_sources(made).values()
    if split not in source.splits:
        raise UserError(
            f"--split {split}: there is no such split in {settings.data.path}."
            f"{did_you_mean(split, source.splits)} Choose one with --split: "
            f"{', '.join(source.splits)}."
        )
    return made


def _task_name(recipe: Recipe, task: str | None) -> str:
    names = list(recipe.tasks_by_name)
    if task is None and len(names) > 1:
        raise UserError(
            f"recipe {recipe.name} has several tasks. Choose one with --task: {', '.join(names)}."
        )
    if task is not None and task not in names:
        raise UserError(
            f"--task {task}: recipe {recipe.name} has no such task.{did_you_mean(task, names)} It "
            f"has: {', '.join(names)}."
        )
    return task or names[0]
