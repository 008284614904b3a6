"""The kinds of task: one file each with its section and its entry."""

from __future__ import annotations

from typing import Annotated

from ds_distill.recipe.data import Columns, Data
from ds_distill.recipe.entry import TaskEntry
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.tasks import (
    character_spans,
    extractive_qa,
    masked_lm,
    multi_label,
    regression,
    single_label,
    token_classification,
)
from ds_distill.recipe.tasks.base import TaskSettings
from ds_distill.recipe.tasks.character_spans import CharacterSpans
from ds_distill.recipe.tasks.extractive_qa import ExtractiveQA
from ds_distill.recipe.tasks.masked_lm import MaskedLM, MaskSettings
from ds_distill.recipe.tasks.multi_label import MultiLabel
from ds_distill.recipe.tasks.regression import Regression
from ds_distill.recipe.tasks.single_label import SingleLabel
from ds_distill.recipe.tasks.token_classification import TokenClassification, Untagged
from ds_distill.recipe.unions import OneOf

__all__ = [
    "TASKS",
    "CharacterSpans",
    "Columns",
    "Data",
    "ExtractiveQA",
    "MaskSettings",
    "MaskedLM",
    "MultiLabel",
    "Regression",
    "SingleLabel",
    "Task",
    "TaskSettings",
    "TokenClassification",
    "Untagged",
    "metric_of",
]

TASKS: dict[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        single_label.ENTRY,
        multi_label.ENTRY,
        regression.ENTRY,
        token_classification.ENTRY,
        character_spans.ENTRY,
        extractive_qa.ENTRY,
        masked_lm.ENTRY,
    )
}
"""A recipe's `task.type` -> the kind of task."""


def metric_of(task: TaskSettings) -> MetricClass:
    """The class of a task's metric."""
    return METRICS[TASKS[task.type].over][task.metric.name]


Task = Annotated[
    TaskSettings,
    OneOf(
        "task",
        "type",
        lambda: {name: entry.settings for name, entry in TASKS.items()},
        default="single-label",
    ),
]
