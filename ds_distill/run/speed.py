"""Size and speed of a run's models."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from ds_distill.models.configuration import load_config
from ds_distill.models.labels import class_names
from ds_distill.models.load import CLASSIFIER, TAGGER, load_model
from ds_distill.process.activity import mark_phase
from ds_distill.process.peak_memory import is_out_of_memory
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import model_at
from ds_distill.recipe.phases import START
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tasks import TASKS
from ds_distill.reporting.results import last_evaluations
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder

QUICK_SECONDS = 0.1
"""For each model at the end of a run, about; of slow ones longer, for `_FEWEST` batches."""
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


@torch.inference_mode()
def quick_speed(
    recipe: Recipe, run: RunFolder, results: Mapping[str, Any], device: torch.device, log: RunLog
) -> dict[str, Any] | None:
    """Median seconds for one text of `max_length` tokens, by model, of those that were evaluated
    last; None where nothing was. In fp32, one model after the other: all of them may not fit.

    device: of the run's ranks.

    A few batches say by how much a student is faster; `ds-distill profile` says the rest.
    """
    if not (evaluations := last_evaluations(dict(results))):
        return None
    record = evaluations[0]
    length = recipe.tasks_by_name[record["task"]].max_length
    seconds: dict[str, float] = {}
    for name in record["models"]:
        if name == START or name in recipe.from_files:
            continue
        mark_phase(f"publish: times {name}")
        try:
            model = load_trained(recipe, run, record["task"], name).eval().to(device)
            found = measure({name: model}, 1, length, device, QUICK_SECONDS)
            seconds[name] = found[name].median
        except Exception as error:  # a run that is done is published whatever a model does here
            full = "it does not fit into the memory of one device"
            log.info(f"  {name} was not timed: {full if is_out_of_memory(error) else error}.")
        model = None
        gc.collect()
    return {
        "task": record["task"],
        "length": length,
        "device": "GPU" if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "seconds": seconds,
    }


def load_trained(recipe: Recipe, run: RunFolder, task: str, name: str) -> PreTrainedModel:
    """A model as the run's last evaluate phase found it."""
    made_by = model_at(recipe, name, len(recipe.phases)).made_by
    if made_by is not None:
        reference, revision = str(run.model(made_by, name)), None
    else:
        reference = resolve_model(recipe.encoders[name], recipe.models_folder)
        revision = recipe.teachers[name].revision
    head = TASKS[recipe.tasks_by_name[task].type].heads[0]
    classifies = head in (CLASSIFIER, TAGGER)
    labels = class_names(load_config(reference, revision)) if classifies else None
    return load_model(head, reference, labels, new_head=False, revision=revision)


class Timed(Protocol):
    """A model that can be timed: transformers', or an exported one."""

    config: Any

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any: ...


def measure(
    models: Mapping[str, Timed], batch: int, length: int, device: torch.device, seconds_each: float
) -> dict[str, Case]:
    """Times of batches of random tokens, by model; seconds_each: for a model, about."""
    inputs = {}
    for name, model in models.items():
        ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
        inputs[name] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    peaks: dict[str, int | None] = dict.fromkeys(models)
    for name, model in models.items():
        for _ in range(_WARM_UP):
            peaks[name] = _peak(model, inputs[name], device)
    ends = time.perf_counter() + seconds_each * len(models)
    while (done := min(map(len, seconds.values()))) < _FEWEST or (
        done < _MOST and time.perf_counter() < ends
    ):
        for name, model in models.items():
            seconds[name].append(_seconds(model, inputs[name], device))
    return {name: Case(batch, length, seconds[name], peaks[name]) for name in models}


def _seconds(model: Timed, inputs: dict[str, Any], device: torch.device) -> float:
    started = time.perf_counter()
    model(**inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _peak(model: Timed, inputs: dict[str, Any], device: torch.device) -> int | None:
    if device.type != "cuda":
        model(**inputs)
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(**inputs)
    torch.cuda.synchronize()
    weights = sum(weight.nbytes for weight in cast(PreTrainedModel, model).parameters())
    return torch.cuda.max_memory_allocated() - before + weights
