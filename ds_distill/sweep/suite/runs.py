"""The runs of a suite: an ordinary recipe for each checkpoint, task, setting and seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_distill.check.recipe import check_all, check_recipe
from ds_distill.errors import UserError, refuse
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate
from ds_distill.run.folder import RunFolder, student_folder
from ds_distill.sweep.grid import SEED, Variant
from ds_distill.sweep.runs import SweepRun
from ds_distill.sweep.suite.schema import Suite


@dataclass(frozen=True)
class Checkpoint:
    name: str
    """As tables call it."""
    model: str
    """A folder, or a hub id."""


@dataclass(frozen=True)
class SuiteRun(SweepRun):
    """A run of a sweep, and what it is of."""

    task: str = ""
    checkpoint: str = ""

    @property
    def grid(self) -> Variant:
        """Setting and seed alone."""
        return Variant(self.variant.overrides[2:])


def checkpoints_of(given: Sequence[str]) -> list[Checkpoint]:
    """given: folders of models or runs (their students), or hub ids. Raises UserError for none, and
    for two that cannot be told apart."""
    if not given:
        raise UserError("a suite needs checkpoints: ds-distill suite SUITE CHECKPOINT CHECKPOINT")
    for parts in (1, 2):
        names = [_name(one, parts) for one in given]
        if len(set(names)) == len(names):
            return [
                Checkpoint(name, str(student_folder(one) or one))
                for name, one in zip(names, given, strict=True)
            ]
    raise UserError(
        f"checkpoints {', '.join(given)}: two have the same name. Name each once, or copy one to "
        "a folder of another name."
    )


def _name(given: str, parts: int) -> str:
    path = Path(given).expanduser()
    path = path.absolute() if path.is_dir() else path
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(path.parts[-parts:])).strip("-.")


def suite_runs(suite: Suite, checkpoints: Sequence[Checkpoint], folder: Path) -> list[SuiteRun]:
    """In the order of the tasks, their checkpoints, settings and seeds."""
    runs = []
    for task in suite.tasks:
        for checkpoint in checkpoints:
            for setting in suite.grid.settings():
                values = [f"{key}={value:g}" for key, value in setting.items()]
                for seed in suite.seeds:
                    about = [f"task={task}", f"checkpoint={checkpoint.name}", *values]
                    variant = Variant((*about, f"{SEED}={seed}"))
                    file = folder / "recipes" / f"{variant.name}.yaml"
                    recipe = _recipe(suite, task, checkpoint, setting, seed)
                    run_folder = RunFolder(folder / "runs" / variant.name)
                    runs.append(
                        SuiteRun(
                            variant, recipe, (str(file),), run_folder, file, task, checkpoint.name
                        )
                    )
    return runs


def _recipe(
    suite: Suite, task: str, checkpoint: Checkpoint, setting: dict[str, Any], seed: int
) -> Recipe:
    data = {
        "name": f"{suite.name[:31]}-{task[:31]}",
        "description": f"{checkpoint.name}, fine-tuned on {task} of the suite {suite.name}.",
        "seed": seed,
        "task": suite.as_written()["tasks"][task],
        "student": {"model": checkpoint.model},
        "training": {**suite.training_of(task), **setting},
        "phases": [{"fine-tune": {"models": "student"}}, {"evaluate": {"split": "test"}}],
        "deepspeed": suite.deepspeed,
        "models_folder": suite.models_folder,
        "data_folder": suite.data_folder,
    }
    return validate(Recipe, data)


def check_suite(runs: Sequence[SuiteRun]) -> list[str]:
    """Notes of the tasks' data. Raises UserError with all that is wrong with data, models and
    settings: each task's data are read once, each checkpoint is looked at with each task."""
    notes, seen = [], set[str]()
    mistakes: dict[str, list[str]] = {}  # what is wrong -> where
    pairs: dict[tuple[str, str], SuiteRun] = {}
    for run in runs:
        pairs.setdefault((run.task, run.checkpoint), run)
    for (task, _), run in pairs.items():
        try:
            if task in seen:
                check_recipe(run.recipe)
            else:
                seen.add(task)
                notes += [f"{task}: {note}" for note in check_all(run.recipe)]
                _check_validation(run)
        except UserError as error:
            for mistake in error.mistakes:
                mistakes.setdefault(mistake, []).append(f"{task} with {run.checkpoint}")
    refuse(f"{', '.join(where)}: {what}" for what, where in mistakes.items())
    return notes


def _check_validation(run: SuiteRun) -> None:
    """Raises UserError for data without the split that chooses."""
    from ds_distill.check.recipe import open_sources

    [source] = open_sources(run.recipe).values()
    if "validation" not in source.splits:
        raise UserError(
            f"its data {run.recipe.task_of(run.recipe.phases[0]).data.path} have no split "
            "'validation', on which a setting is chosen, because the test split must not choose. "
            "Say where it is with data.splits.validation."
        )
