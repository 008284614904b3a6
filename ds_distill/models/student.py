"""What a recipe's models are before any training, without their weights. Imports no torch."""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig

from ds_distill.models.configuration import load_config
from ds_distill.models.layers import check_layers, cut_to_layers
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.schema import Recipe, Student


def teacher_config(recipe: Recipe, name: str) -> PreTrainedConfig:
    """A teacher's configuration. Raises UserError where it cannot be read."""
    teacher = recipe.teachers[name]
    return load_config(resolve_model(teacher.model, recipe.models_folder), teacher.revision)


def student_config(recipe: Recipe) -> PreTrainedConfig:
    """The student's configuration. Raises UserError where it cannot be read, or no such student
    can be made."""
    student = recipe.student
    given = load_config(resolve_model(student.model, recipe.models_folder), student.revision)
    return student_of(given, student)


def student_of(given: PreTrainedConfig, student: Student) -> PreTrainedConfig:
    """The student's configuration, from that of its `model`, which stays as it is.

    Raises UserError where no such student can be made.
    """
    if student.layers is None:
        return given
    check_layers(given, student.layers)
    config = copy.deepcopy(given)
    cut_to_layers(config, student.layers)
    return config
