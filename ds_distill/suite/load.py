"""From a suite's file and key=value overrides to a Suite, with errors that name the line."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_distill.errors import UserError, did_you_mean
from ds_distill.recipe.changes import apply_override
from ds_distill.recipe.load import name_of, read, validate
from ds_distill.suite.schema import Suite


def builtin_suites() -> dict[str, Path]:
    """Names and files of the suites that come with the package."""
    folder = Path(str(importlib.resources.files("ds_configs"))) / "suites"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_suite(reference: str, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite (file or built-in name) and apply `key=value` overrides, as `load_recipe` does;
    `tasks.NAME=null` leaves a task out.

    Raises UserError naming file:line, key and fix for each mistake.
    """
    known = builtin_suites()
    path = Path(reference) if os.path.isfile(reference) else known.get(reference)
    if path is None:
        raise UserError(
            f"suite {reference!r} is neither a file nor a built-in suite."
            f"{did_you_mean(reference, known)} Built-in: {', '.join(known)}."
        )
    tree, data = read(path)
    data = {"name": name_of(path), **data}
    for override in overrides:
        apply_override(tree, data, override)
    if isinstance(tasks := data.get("tasks"), dict):
        data["tasks"] = {name: task for name, task in tasks.items() if task is not None}
        _leave_out(data, {name for name, task in tasks.items() if task is None})
    return validate(Suite, tree, data)


def _leave_out(data: dict[str, Any], tasks: set[str]) -> None:
    """Take what a suite's data say of some tasks out: their training, their place in a group, and
    groups of no other tasks."""
    if isinstance(training := data.get("task_training"), dict):
        data["task_training"] = {t: own for t, own in training.items() if t not in tasks}
    groups = data.get("groups")
    if tasks and isinstance(groups, dict) and all(isinstance(g, list) for g in groups.values()):
        left = {name: [t for t in group if t not in tasks] for name, group in groups.items()}
        data["groups"] = {name: group for name, group in left.items() if group}
