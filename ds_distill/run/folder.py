"""A run's folder, through which phases pass models and records to each other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_distill.errors import UserError
from ds_distill.files import new_folder, publish_folder, read_json, write_json, write_text
from ds_distill.recipe import Recipe, dump_recipe, load_recipe
from ds_distill.run.stopping import same_command

TRAINING_RECORD = "training.json"
"""Beside a trained model's weights: examples, steps, validation accuracy."""


class RunFolder:
    """Paths and records of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.json"
        self.report = path / "report.html"
        self.student = path / "student"

    def data(self, task: str | None) -> Path:
        """The folder of a task's splits. task: its name; None for the only one."""
        return self.path / "data" if task is None else self.path / "data" / task

    def fitted(self, task: str | None) -> Path:
        """What an expertise phase has fitted on a task."""
        return self.path / (f"routing-{task}.safetensors" if task else "routing.safetensors")

    def comparison(self, task: str | None) -> Path:
        """The comparison of policies on a task."""
        return self.path / (f"routing-{task}.json" if task else "routing.json")

    def holds_run(self) -> bool:
        return (self.path / "recipe.yaml").is_file()

    def check_new_or_same(self, recipe: Recipe, resume: bool) -> None:
        """Raises UserError for a folder of another run, and for a resume with another recipe."""
        written = self.path / "recipe.yaml"
        if self.path.exists() and not self.path.is_dir():
            raise UserError(
                f"--folder {self.path}: is a file, and a run needs a folder. Name another one."
            )
        for parent in self.path.parents:
            if parent.exists():
                if not parent.is_dir() or not os.access(parent, os.W_OK):
                    what = "is not writable" if parent.is_dir() else "is a file"
                    raise UserError(
                        f"--folder {self.path}: cannot be created, because {parent} {what}. Name "
                        "another folder."
                    )
                break
        if not resume:
            # A kill before the recipe was written leaves at most this temporary file.
            present = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
            if present - {".recipe.yaml.tmp"}:
                what = "holds a run" if written.is_file() else f"holds {sorted(present)[0]}"
                fix = "Add --resume to continue that run, " if written.is_file() else "Give "
                raise UserError(
                    f"the run's folder {self.path} exists and {what}. {fix}--folder for another "
                    "one, or remove it."
                )
            return
        if not written.is_file():
            raise UserError(
                f"--resume: {self.path} holds no recipe.yaml, so there is no run to continue. "
                "Start it without --resume, or name the run's folder with --folder."
            )
        old, new = load_recipe(str(written)).model_dump(), recipe.model_dump()
        changed = [_shown(key, old[key], new[key]) for key in new if old[key] != new[key]]
        if changed:
            raise UserError(
                f"--resume: the recipe differs from the run's own ({written}) in "
                f"{'; '.join(changed)}. Continue with the same recipe and overrides, or start a "
                "new run with --folder."
            )

    def how_to_continue(self, *options: str) -> str:
        """A sentence for a stopped run: what is saved, and the command to continue, with
        `options`."""
        if not self.holds_run():
            return f"Nothing was written. Start again with: {same_command()}"
        done = ", ".join(path.stem[3:] for path in sorted((self.path / "phases").glob("*.json")))
        newest = [
            (folder.name[3:], max(int(step.name.removeprefix("step-")) for step in steps))
            for folder in sorted((self.path / "checkpoints").glob("*"))
            if (steps := list(folder.glob("step-*")))
        ]
        steps_saved = ", ".join(f"{output} at step {step}" for output, step in newest)
        saved = [
            *([f"the phases {done}"] if done else []),
            *([f"the checkpoint of {steps_saved}"] if steps_saved else []),
        ]
        return (
            f"{self.path} keeps {' and '.join(saved) or 'what was written'}. Continue with: "
            f"{same_command(*options)}"
        )

    def create(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Create the folder. Raises UserError when that fails, and leaves nothing behind."""
        new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(
                self.path / "recipe.yaml", dump_recipe(recipe)
            )  # first: with it the folder holds a run
            write_json(self.path / "environment.json", environment)
        except OSError as error:
            if new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise UserError(
                f"--folder {self.path}: the run's folder cannot be written: "
                f"{error.strerror or error}. Free some space, or name another folder."
            ) from error

    def model(self, number: int, output: str) -> Path:
        """The folder of the model `output` that phase `number` trains."""
        return self.path / "models" / f"{number:02d}-{output}"

    def checkpoints(self, number: int, output: str) -> Path:
        return self.path / "checkpoints" / f"{number:02d}-{output}"

    def cache(self, number: int, name: str) -> Path:
        """The folder of cache phase `number`, unless the recipe names another one."""
        return self.path / "cache" / f"{number:02d}-{name}"

    def record(self, number: int, name: str) -> Path:
        """The file with the results of a phase. It exists once the phase is done."""
        return self.path / "phases" / f"{number:02d}-{name}.json"

    def read_record(self, number: int, name: str) -> dict[str, Any] | None:
        path = self.record(number, name)
        return read_json(path) if path.is_file() else None

    @contextmanager
    def new_model(self, number: int, output: str) -> Iterator[Path]:
        """A folder for the best model so far; a later, better one replaces it."""
        with new_folder(self.checkpoints(number, output) / "kept") as folder:
            yield folder

    def publish_model(self, number: int, output: str, record: dict[str, Any]) -> None:
        """Make the best model the training's result, beside its record, and remove the
        checkpoints. Main process."""
        model = self.model(number, output)
        best = self.checkpoints(number, output) / "kept"
        write_json(best / TRAINING_RECORD, record)
        model.parent.mkdir(exist_ok=True)
        publish_folder(best, model)
        self._remove_checkpoints(number, output)

    def finished_training(self, number: int, output: str) -> dict[str, Any] | None:
        """The record of a training that ended before a kill, or None."""
        record = self.model(number, output) / TRAINING_RECORD
        if not record.is_file():
            return None
        self._remove_checkpoints(number, output)
        return dict(read_json(record))

    def _remove_checkpoints(self, number: int, output: str) -> None:
        shutil.rmtree(self.checkpoints(number, output), ignore_errors=True)
        parent = self.path / "checkpoints"
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


def _shown(key: str, old: Any, new: Any) -> str:
    """The first innermost key that differs, in dotted form, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for inner in {**old, **new}:
            if old.get(inner) != new.get(inner):
                return _shown(f"{key}.{inner}", old.get(inner), new.get(inner))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            if before != after:
                return _shown(f"{key}.{index}", before, after)
    return f"{key} (was {old!r}, now {new!r})"
