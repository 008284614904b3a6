"""The kinds of task: one file each."""

from __future__ import annotations

from typing import Annotated

from ds_distill.parts.data import Columns, Data
from ds_distill.parts.one_of import OneOf
from ds_distill.parts.tasks.base import TaskSettings
from ds_distill.parts.tasks.masked_lm import MaskedLM, MaskSettings
from ds_distill.parts.tasks.single_label import SingleLabel

__all__ = [
    "TASKS",
    "Columns",
    "Data",
    "MaskSettings",
    "MaskedLM",
    "SingleLabel",
    "Task",
    "TaskSettings",
]

TASKS: dict[str, type[TaskSettings]] = {"single-label": SingleLabel, "masked-lm": MaskedLM}
"""A recipe's `task.type` -> the section of that kind of task."""

Task = Annotated[
    SingleLabel | MaskedLM,
    OneOf("task", "type", lambda: TASKS, default="single-label"),
]
