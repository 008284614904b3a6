"""From a program: a recipe's run, and the main job in one call."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_distill.files import read_json, write_text
from ds_distill.recipe import Recipe
from ds_distill.run.folder import Resume, RunFolder


@dataclass(frozen=True)
class FinishedRun:
    """What a run wrote."""

    folder: Path
    results: dict[str, Any] = field(repr=False)
    """Content of results.json: `student` (the name of the chosen one), `verdict`, and one record
    per phase in `phases`."""
    report: Path
    """report.html."""
    student: Path | None
    """Folder of the chosen student, which `from_pretrained` loads; None where no phase trains a
    model."""

    @property
    def scores(self) -> dict[str, float | None]:
        """Model -> its score on the last split that was evaluated, by that evaluation's metric."""
        judged = [phase for phase in self.results["phases"] if phase["kind"] == "evaluate"]
        if not judged:
            return {}
        metric = judged[-1]["metric"]
        return {name: model.get(metric) for name, model in judged[-1]["models"].items()}

    def _repr_html_(self) -> str:
        """A notebook shows the report."""
        page = html.escape(self.report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="800"></iframe>'


def run_recipe(recipe: Recipe, folder: str | Path, *, resume: Resume = False) -> FinishedRun:
    """Run all phases of a recipe, as `ds-distill run` does.

        run_recipe(load_recipe("quickstart", ["seed=1"]), "runs/quickstart")

    folder: of the run; made here.
    resume: continue the run that is in it; "auto": where one is.

    It runs in this process, or on all ranks when a launcher (deepspeed, torchrun) started this
    program on several; then each of them calls it. Environment variables, torch's random state
    and the verbosity of transformers and datasets are afterwards as before.

    Raises UserError for what you can fix: nothing is written then, or what was finished is kept
    for `resume`.
    """
    path = Path(folder)
    with _restored_environment(), _restored_libraries():
        from ds_distill.run.execute import execute  # imports deepspeed: seconds

        execute(recipe, path, resume=resume)
        written = RunFolder(path)
        return FinishedRun(
            folder=path,
            results=read_json(written.results),
            report=written.report,
            student=written.student if written.student.is_dir() else None,
        )


def distil(
    data: str | Path,
    *,
    teachers: Sequence[str],
    student: str | None = None,
    folder: str | Path | None = None,
    overrides: Sequence[str] = (),
    task: str | None = None,
    text: Sequence[str] = (),
    label: str | None = None,
) -> FinishedRun:
    """Distil teachers into a student on the examples of a folder or a file.

        done = distil("reviews", teachers=["models/bert", "models/roberta"], student="models/small")

    What the columns are, the labels and the length are guessed as `ds-distill init` does. The
    recipe is printed, and written beside the run's folder: the next run may change it.

    data: a folder with a file for each split, or one file.
    teachers: folders or hub ids; one without a head for the task is fine-tuned first.
    student: a folder or hub id; None for some of the first teacher's layers.
    folder: of the run; None for runs/ and the name of the data.
    overrides: changes of the recipe, such as "training.epochs=3".
    task, text, label: `task.type` and names of columns, where they are not to be guessed.

    Raises UserError for what you can fix.
    """
    from ds_distill.init.recipe import DataOptions, guess, recipe_text
    from ds_distill.recipe import load_recipe

    path = Path(folder or Path("runs") / Path(data).resolve().name.split(".")[0])
    found = guess(Path(data), DataOptions(task, text, label))
    written = recipe_text(found, str(data), list(teachers), student)
    recipe = path.with_name(f"{path.name}.yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    write_text(recipe, written)
    print(f"{written}Written to {recipe}.")
    return run_recipe(load_recipe(recipe, overrides), path)


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Ends the group of processes that is begun within, unless a launcher's, and restores the
    environment variables."""
    import torch

    before = dict(os.environ)
    began = torch.distributed.is_initialized()
    try:
        yield
    finally:
        if not began and "RANK" not in before and torch.distributed.is_initialized():
            from ds_distill.engine.world import World

            World.stop()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _restored_libraries() -> Iterator[None]:
    """Restores torch's random state, and how much transformers and datasets print."""
    import datasets
    import torch
    import transformers

    logging = transformers.utils.logging
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    verbosity, model_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    data_bars = not datasets.are_progress_bars_disabled()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if model_bars:
            logging.enable_progress_bar()
        if data_bars:
            datasets.enable_progress_bars()
