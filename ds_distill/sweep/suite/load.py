"""From a suite's file and key=value overrides to a Suite, with errors that name the line."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from ds_distill.errors import UserError, did_you_mean
from ds_distill.recipe.load import name_of, read, validate
from ds_distill.recipe.overrides import apply_override
from ds_distill.recipe.yaml_tree import Items, Keys
from ds_distill.sweep.suite.schema import Suite


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
    data = read(path)
    data.setdefault("name", name_of(path))
    for override in overrides:
        apply_override(data, override)
    if isinstance(tasks := data.get("tasks"), Keys):
        _leave_out(data, [name for name, task in tasks.items() if task is None])
    return validate(Suite, data)


def _leave_out(data: Keys, tasks: Collection[str]) -> None:
    """Take tasks out of a suite: their settings, their place in a group, and groups of no other
    tasks. What has another form is left, and refused."""
    for name in ("tasks", "task_training"):
        for task in tasks if isinstance(data.get(name), Keys) else ():
            data[name].pop(task, None)
    groups = data["groups"] if isinstance(data.get("groups"), Keys) else Keys("")
    for name, group in list(groups.items()):
        if isinstance(group, Items) and not set(tasks).isdisjoint(group):
            for number in reversed(range(len(group))):
                if group[number] in tasks:
                    group.drop(number)
            if not group:
                del groups[name]
