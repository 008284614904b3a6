"""The keys of a suite. Every field's docstring is its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from ds_distill.recipe.schema import Seed
from ds_distill.recipe.section import Count, Mistake, Name, Section, refused
from ds_distill.recipe.tasks import Task
from ds_distill.recipe.training import Training

Values = Annotated[list[Any], Field(min_length=1)]


class Grid(Section):
    """Values that are tried, each combination; the best on the examples that choose is taken, for
    each task and checkpoint."""

    learning_rate: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
    """The highest ones, of AdamW."""
    batch_size: Annotated[list[Count], Field(min_length=1)]
    """Examples per optimizer step."""
    epochs: Annotated[list[Count], Field(min_length=1)] | None = None
    """Passes over the training split. Default: those of `training`."""

    @field_validator("learning_rate", "batch_size", "epochs")
    @classmethod
    def _values_differ(cls, values: list[Any] | None) -> list[Any] | None:
        if values is not None and len(set(values)) < len(values):
            raise ValueError("names a value twice")
        return values

    def settings(self) -> Iterator[dict[str, Any]]:
        """Each combination, by key."""
        given = {key: values for key, values in self.model_dump().items() if values is not None}
        return (dict(zip(given, chosen, strict=True)) for chosen in product(*given.values()))


class Suite(Section):
    """Tasks, and how a checkpoint is fine-tuned on each."""

    name: Name
    """Part of the folder, runs/NAME. Default: the file's name without its ending."""
    description: str = ""
    """One line."""
    lacks: str = ""
    """What it does not have of the suite that it follows: reports show it."""
    seeds: Annotated[list[Seed], Field(min_length=1)]
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
    groups: dict[Name, Annotated[list[Name], Field(min_length=1)]] = Field(default_factory=dict)
    """Tasks of one kind, by a name of theirs. Where groups are named, each task is in one, and a
    macro mean stands beside the mean over tasks: the mean over the groups of the mean over each
    one's tasks, as BLURB's score."""
    deepspeed: str = "zero0_auto"
    """As in a recipe."""
    models_folder: str | None = None
    """As in a recipe."""
    data_folder: str | None = None
    """As in a recipe."""

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("names a seed twice")
        return seeds

    @model_validator(mode="after")
    def _keys_fit(self) -> Suite:
        if mistakes := [*self._training_mistakes(), *self._group_mistakes()]:
            raise refused(mistakes)
        for name, task in self.tasks.items():
            task.stands_at(f"tasks.{name}")
        return self

    def _training_mistakes(self) -> Iterator[Mistake]:
        for name in self.task_training:
            if name not in self.tasks:
                known = ", ".join(self.tasks)
                yield ("task_training", name), f"there is no such task. There is: {known}"
        tried = {key for setting in self.grid.settings() for key in setting}
        for name, training in [("training", self.training), *self.task_training.items()]:
            where = ("training",) if name == "training" else ("task_training", name)
            for key in sorted(tried & training.model_fields_set):
                yield (*where, key), f"stands in the grid as well, grid.{key}: keep one"

    def _group_mistakes(self) -> Iterator[Mistake]:
        seen: dict[str, str] = {}  # task -> group
        for group, tasks in self.groups.items():
            for task in tasks:
                if task not in self.tasks:
                    known = ", ".join(self.tasks)
                    yield ("groups", group), f"there is no task {task!r}. There is: {known}"
                elif task in seen:
                    other = seen[task]
                    what = f"task {task!r} is in group {other!r} as well: keep it in one"
                    yield ("groups", group), what
                seen[task] = group
        for task in self.tasks if self.groups else ():
            if task not in seen:
                yield ("groups",), f"no group has task {task!r}: put it into one"

    def weights_of_groups(self) -> dict[str, float] | None:
        """What each task counts in the macro mean; None where there are no groups."""
        if not self.groups:
            return None
        return {
            task: 1 / (len(self.groups) * len(tasks))
            for tasks in self.groups.values()
            for task in tasks
        }

    def training_of(self, task: str) -> dict[str, Any]:
        """What a task's fine-tunings have, the grid apart."""
        both = [self.training, *([self.task_training[task]] if task in self.task_training else [])]
        return {
            key: value
            for one in both
            for key, value in one.model_dump(mode="json", exclude_unset=True).items()
        }
