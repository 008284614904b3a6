"""Where the settings of a task's data stand in its recipe, for messages."""

from __future__ import annotations

from ds_distill.recipe.tasks import Task

_SPLITS = ".data.splits."


def key_of(task: Task, key: str) -> str:
    """A key of a task, `data.path`, as the recipe has it: `task.data.path`; of one of several tasks
    `tasks.NAME.data.path`; of one that reads a split from other data, which it knows as train,
    `task.data.splits.NAME.path`."""
    location = task.location
    if key == "type" or _SPLITS not in location:
        return f"{location.partition(_SPLITS)[0]}.{key}"
    return f"{location}.{'split' if key == 'data.splits.train' else key.removeprefix('data.')}"


def labels_named(task: Task) -> str:
    """How the recipe would name the labels of a task."""
    key = key_of(task, "labels")
    return f"{key}={{THEIRS: OURS}}" if _SPLITS in task.location else f"{key}=[A, B]"
