"""Latency, throughput and size of a finished run's models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_distill.errors import UserError
from ds_distill.recipe import load_recipe
from ds_distill.recipe.phases import START
from ds_distill.records import read_results
from ds_distill.reporting.results import records_of
from ds_distill.run.folder import RunFolder, why_no_models
from ds_distill.run.speed import Case, load_trained, measure

BATCHES = (1, 32)
LENGTHS = (32, 128)
"""Tokens; those of the task's `max_length` are measured, too, and none longer."""
SECONDS = 3.0
"""For each model and case, about."""


@dataclass(frozen=True)
class ProfiledModel:
    """A model's size, quality and speed."""

    name: str
    role: str
    """`teacher`, `student` or `control`: a student that no teacher taught."""
    parameters: int
    file_bytes: int
    """Of its weights in fp32."""
    metric: str
    score: float | None
    """In that metric, on the split that the run's evaluate phase names."""
    cases: list[Case]

    def to_json(self) -> dict[str, Any]:
        cases = [
            {
                **asdict(case),
                "percentiles": case.percentiles,
                "texts_per_second": case.per_second,
            }
            for case in self.cases
        ]
        return {**asdict(replace(self, cases=[])), "cases": cases}


@torch.inference_mode()
def profile_models(folder: Path, progress: Callable[[str], None]) -> list[ProfiledModel]:
    """The models that a finished run has evaluated, in fp32, on a GPU if there is one. They take
    turns, batch by batch, so that a machine that slows down slows all of them.

    Raises UserError for a run that has not finished, has evaluated nothing or kept no models.
    """
    run = RunFolder(folder)
    run.check_finished()
    if (why := why_no_models(folder)) is not None:
        raise UserError(f"{folder}: {why}")
    recipe = load_recipe(folder / "recipe.yaml")
    evaluated = records_of(read_results(run.results), "evaluation")
    if not evaluated:
        raise UserError(f"{folder}: this run has no evaluate phase, which names the models.")
    record = evaluated[-1]
    known = {*recipe.teachers, *(name for _, name in recipe.trained_models()), START}
    if strange := sorted({*record["models"]} - known):
        raise UserError(
            f"{run.results}: it has the model {strange[0]!r}, which the run's recipe has not. Copy "
            "the run again."
        )
    if record["task"] not in recipe.tasks_by_name:
        raise UserError(
            f"{run.results}: it has the task {record['task']!r}, which the run's recipe has not. "
            "Copy the run again."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: dict[str, PreTrainedModel] = {}
    for name in record["models"]:
        if name != START and name not in recipe.from_files:
            progress(f"Loading {name} ...")
            loaded[name] = load_trained(recipe, run, record["task"], name).eval().to(device)
    if not loaded:
        raise UserError(f"{folder}: this run has evaluated no model that has weights.")
    task = recipe.tasks_by_name[record["task"]]
    cases: dict[str, list[Case]] = {name: [] for name in loaded}
    lengths = sorted({*(n for n in LENGTHS if n < task.max_length), task.max_length})
    for batch in BATCHES:
        for length in lengths:
            progress(f"Measuring batches of {batch}, {length} tokens each ...")
            for name, case in measure(loaded, batch, length, device, SECONDS).items():
                cases[name].append(case)
    found = []
    for name, model in loaded.items():
        parameters = sum(parameter.numel() for parameter in model.parameters())
        of_model, metric = record["models"][name], record["metric"]
        role, score = of_model["role"], of_model.get(metric)
        found.append(
            ProfiledModel(name, role, parameters, 4 * parameters, metric, score, cases[name])
        )
    return found


def points(models: Sequence[ProfiledModel]) -> dict[str, tuple[float, float]]:
    """Of each model with a score: (milliseconds of one text of the longest length, score)."""
    return {
        model.name: (
            1e3 * max((c for c in model.cases if c.batch == 1), key=lambda c: c.length).median,
            model.score,
        )
        for model in models
        if model.score is not None
    }
