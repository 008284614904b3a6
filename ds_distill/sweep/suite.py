"""A suite: tasks on which checkpoints are fine-tuned, each with settings of a grid and seeds. Its
runs are those of a sweep. Every field's docstring is its documentation."""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, model_validator

from ds_distill.errors import Mistake, UserError, did_you_mean
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import name_of, validate
from ds_distill.recipe.schema import Seed
from ds_distill.recipe.section import Count, Name, Section, refused
from ds_distill.recipe.tasks import Task
from ds_distill.recipe.text import read
from ds_distill.recipe.training import Training
from ds_distill.run.folder import student_folder
from ds_distill.sweep.runs import SEED, SweepRun, Variant

T = TypeVar("T")


def _differ(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("names a value twice")
    return values


Values = Annotated[list[T], Field(min_length=1), AfterValidator(_differ)]


class Grid(Section):
    """Values that are tried, each combination; the best on the examples that choose is taken, for
    each task and checkpoint."""

    learning_rate: Values[Annotated[float, Field(gt=0)]]
    """The highest ones, of AdamW."""
    batch_size: Values[Count]
    """Examples per optimizer step."""
    epochs: Values[Count] | None = None
    """Passes over the training split. Default: those of `training`."""

    def settings(self) -> Iterator[dict[str, Any]]:
        """Each combination, by key."""
        given = self.model_dump(exclude_none=True)
        return (dict(zip(given, chosen, strict=True)) for chosen in product(*given.values()))


class Suite(Section):
    """Tasks, and how a checkpoint is fine-tuned on each."""

    name: Name
    """Part of the folder, runs/NAME. Default: the file's name without its ending."""
    description: str = ""
    """One line."""
    lacks: str = ""
    """What it does not have of the suite that it follows: reports show it."""
    seeds: Values[Seed]
    """Every fine-tuning is done with each."""
    grid: Grid
    """The settings that are tried."""
    training: Training = Training()
    """Of all fine-tunings, as in a recipe; keys of the grid apart."""
    task_training: dict[Name, Training] = Field(default_factory=dict)
    """By task: what it has otherwise than `training`."""
    tasks: Annotated[dict[Name, Task], Field(min_length=1)]
    """The tasks, each as in a recipe. Each needs the splits train, validation (which chooses the
    setting) and test (which judges)."""
    groups: dict[Name, Values[Name]] = Field(default_factory=dict)
    """Tasks of one kind, by a name of theirs. Where groups are named, each task is in one, and a
    macro mean stands beside the mean over tasks: the mean over the groups of the mean over each
    one's tasks, as BLURB's score."""
    deepspeed: str = "zero0_auto"
    """As in a recipe."""
    models_folder: str | None = None
    """As in a recipe."""
    data_folder: str | None = None
    """As in a recipe."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Suite:
        if mistakes := [*self._training_mistakes(), *self._group_mistakes()]:
            raise refused(mistakes)
        for name, task in self.tasks.items():
            task.stands_at(f"tasks.{name}")
        return self

    def _training_mistakes(self) -> Iterator[Mistake]:
        for name in self.task_training.keys() - self.tasks.keys():
            known = ", ".join(self.tasks)
            yield Mistake(f"task_training.{name}", f"there is no such task. There is: {known}")
        tried = self.grid.model_dump(exclude_none=True).keys()
        sections = {f"task_training.{name}": one for name, one in self.task_training.items()}
        for where, training in {"training": self.training, **sections}.items():
            for key in sorted(tried & training.model_fields_set):
                yield Mistake(f"{where}.{key}", f"stands in the grid as well, grid.{key}: keep one")

    def _group_mistakes(self) -> Iterator[Mistake]:
        seen: dict[str, str] = {}  # task -> group
        for group, task in ((group, task) for group, of in self.groups.items() for task in of):
            if task not in self.tasks:
                known = f"there is no task {task!r}. There is: {', '.join(self.tasks)}"
                yield Mistake(f"groups.{group}", known)
            elif seen.setdefault(task, group) != group:
                what = f"task {task!r} is in group {seen[task]!r} as well: keep it in one"
                yield Mistake(f"groups.{group}", what)
        for task in self.tasks if self.groups else ():
            if task not in seen:
                yield Mistake("groups", f"no group has task {task!r}: put it into one")

    def weights(self) -> dict[str, dict[str, float]]:
        """What each task counts in the `mean` and, where there are groups, in the `macro mean`."""
        found = {"mean": dict.fromkeys(self.tasks, 1 / len(self.tasks))}
        if self.groups:
            groups = self.groups.values()
            found["macro mean"] = {one: 1 / (len(groups) * len(of)) for of in groups for one in of}
        return found

    def recipe(self, task: str, checkpoint: str, model: str, **training: Any) -> Recipe:
        """Of a fine-tuning.

        checkpoint: its name; model: where it is. training: `seed`, and a setting of the grid.
        """
        given = self.as_written()
        seed, tuned = training.pop("seed"), dict[str, Any]()
        for one in (self.training, self.task_training.get(task, Training())):
            tuned |= one.model_dump(mode="json", exclude_unset=True)
        return validate(
            Recipe,
            {
                "name": f"{self.name[:31]}-{task[:31]}",
                "description": f"{checkpoint}, fine-tuned on {task} of the suite {self.name}.",
                "seed": seed,
                "task": given["tasks"][task],
                "student": {"model": model},
                "training": {**tuned, **training},
                "phases": [{"fine-tune": {"models": "student"}}, {"evaluate": {"split": "test"}}],
                **{key: given[key] for key in ("deepspeed", "models_folder", "data_folder")},
            },
        )


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
    text = read(path)
    text.values.setdefault("name", name_of(path))
    for override in overrides:
        text.override(override)
    if isinstance(tasks := text.values.get("tasks"), dict):
        _leave_out(text.values, [name for name, task in tasks.items() if task is None])
    return validate(Suite, text.values, text.places)


def _leave_out(values: dict[Any, Any], gone: Collection[str]) -> None:
    """Take tasks out of a suite: their settings, their place in a group, and groups of no other
    tasks. What has another form is left, and refused."""
    for name in ("tasks", "task_training"):
        if isinstance(of := values.get(name), dict):
            values[name] = {task: one for task, one in of.items() if task not in gone}
    if isinstance(groups := values.get("groups"), dict):
        left = {
            name: [task for task in of if task not in gone] if isinstance(of, list) else of
            for name, of in groups.items()
        }
        values["groups"] = {name: of for name, of in left.items() if of != [] or of == groups[name]}


def checkpoints_of(given: Sequence[str]) -> dict[str, str]:
    """The models, folders or hub ids, by the names that tables have.

    given: folders of models or runs (their students), or hub ids. Raises UserError for none, and
    for two that cannot be told apart.
    """
    if not given:
        raise UserError("a suite needs checkpoints: ds-distill suite SUITE CHECKPOINT CHECKPOINT")
    for parts in (1, 2):
        found = {_name(one, parts): str(student_folder(one) or one) for one in given}
        if len(found) == len(given):
            return found
    raise UserError(
        f"checkpoints {', '.join(given)}: two have the same name. Name each once, or copy one to "
        "a folder of another name."
    )


def _name(given: str, parts: int) -> str:
    path = Path(given).expanduser()
    path = path.absolute() if path.is_dir() else path
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(path.parts[-parts:])).strip("-.")


def suite_runs(suite: Suite, checkpoints: Mapping[str, str], folder: Path) -> list[SweepRun]:
    """In the order of the tasks, their checkpoints, settings and seeds.

    checkpoints: the models by name. folder: the suite's.
    """
    runs = []
    every = product(suite.tasks, checkpoints, suite.grid.settings(), suite.seeds)
    for task, checkpoint, setting, seed in every:
        values = [f"{key}={value:g}" for key, value in setting.items()]
        about = (f"task={task}", f"checkpoint={checkpoint}", *values, f"{SEED}={seed}")
        recipe = suite.recipe(task, checkpoint, checkpoints[checkpoint], seed=seed, **setting)
        runs.append(SweepRun(Variant(about), recipe, folder))
    return runs
