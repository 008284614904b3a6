"""Latency, throughput and size of a finished run's models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ds_distill.errors import UserError
from ds_distill.models.configuration import load_config
from ds_distill.models.labels import class_names
from ds_distill.models.load import CLASSIFIER, TAGGER, load_model
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.recipe.phases.evaluate import START
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tasks import TASKS
from ds_distill.run.folder import RunFolder
from ds_distill.run.records import read_results

BATCHES = (1, 32)
LENGTHS = (32, 128)
"""Tokens; those of the task's `max_length` are measured, too, and none longer."""
SECONDS = 3.0
"""For each model and case, about."""
_FEWEST, _MOST = 5, 300
_WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A model's time for batches of one shape."""

    batch: int
    length: int
    seconds: list[float]
    """Of each batch."""
    peak: int | None = None
    """Bytes of the model and of what a pass holds; None on a CPU."""

    @cached_property
    def percentiles(self) -> tuple[float, float | None, float | None]:
        """p50, p90 and p99 of the seconds; None of too few batches for one of them to be beyond:
        p90 needs 10, p99 100."""
        found = np.percentile(self.seconds, [50, 90, 99]).tolist()
        p90, p99 = (
            value if self.repeats >= needed else None
            for value, needed in zip(found[1:], (10, 100), strict=True)
        )
        return found[0], p90, p99

    @property
    def median(self) -> float:
        return self.percentiles[0]

    @property
    def repeats(self) -> int:
        return len(self.seconds)

    @property
    def per_second(self) -> float:
        """Texts a second."""
        return self.batch * self.repeats / sum(self.seconds)


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

    Raises UserError for a run that has not finished or has evaluated nothing.
    """
    run = RunFolder(folder)
    if not run.results.is_file():
        raise UserError(f"{folder}: this run has not finished. {run.how_to_continue('--resume')}")
    recipe = load_recipe(folder / "recipe.yaml")
    evaluated = [
        phase for phase in read_results(run.results)["phases"] if phase["kind"] == "evaluate"
    ]
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
        if name != START:
            progress(f"Loading {name} ...")
            loaded[name] = _load(recipe, run, record["task"], name).eval().to(device)
    task = recipe.tasks_by_name[record["task"]]
    cases: dict[str, list[Case]] = {name: [] for name in loaded}
    lengths = sorted({*(n for n in LENGTHS if n < task.max_length), task.max_length})
    for batch in BATCHES:
        for length in lengths:
            progress(f"Measuring batches of {batch}, {length} tokens each ...")
            for name, case in _measure(loaded, batch, length, device).items():
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


def _load(recipe: Recipe, run: RunFolder, task: str, name: str) -> PreTrainedModel:
    """A model as the run's last evaluate phase found it."""
    trained = [str(run.model(n, output)) for n, output in recipe.trained_models() if output == name]
    if trained:
        reference, revision = trained[-1], None
    else:
        given = recipe.teachers[name]
        reference, revision = resolve_model(given.model, recipe.models_folder), given.revision
    head = TASKS[recipe.tasks_by_name[task].type].heads[0]
    classifies = head in (CLASSIFIER, TAGGER)
    labels = class_names(load_config(reference, revision)) if classifies else None
    return load_model(head, reference, labels, new_head=False, revision=revision)


def _measure(
    models: dict[str, PreTrainedModel], batch: int, length: int, device: torch.device
) -> dict[str, Case]:
    inputs = {}
    for name, model in models.items():
        ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
        inputs[name] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    peaks: dict[str, int | None] = dict.fromkeys(models)
    for name, model in models.items():
        for _ in range(_WARM_UP):
            peaks[name] = _peak(model, inputs[name], device)
    ends = time.perf_counter() + SECONDS * len(models)
    while _goes_on(min(map(len, seconds.values())), ends):
        for name, model in models.items():
            seconds[name].append(_seconds(model, inputs[name], device))
    return {name: Case(batch, length, seconds[name], peaks[name]) for name in models}


def _goes_on(repeats: int, ends: float) -> bool:
    return repeats < _FEWEST or (repeats < _MOST and time.perf_counter() < ends)


def _seconds(model: PreTrainedModel, inputs: dict[str, Any], device: torch.device) -> float:
    started = time.perf_counter()
    model(**inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _peak(model: PreTrainedModel, inputs: dict[str, Any], device: torch.device) -> int | None:
    if device.type != "cuda":
        model(**inputs)
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(**inputs)
    torch.cuda.synchronize()
    weights = sum(weight.nbytes for weight in model.parameters())
    return torch.cuda.max_memory_allocated() - before + weights


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
