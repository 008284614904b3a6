"""Latency, throughput and size of a finished run's models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_distill.errors import UserError
from ds_distill.planning.units import gib, milliseconds
from ds_distill.recipe import load_recipe
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.phases import START
from ds_distill.records import read_results
from ds_distill.reporting.figures import new_figure, of_scores
from ds_distill.reporting.results import records_of, task_metric_of
from ds_distill.run.folder import RunFolder, why_no_models
from ds_distill.run.speed import Case, load_trained, measure
from ds_distill.tables import Table

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
    metric: MetricClass
    score: float | None
    """In that metric, on the split that the run's evaluate phase names."""
    cases: list[Case]

    @property
    def file_bytes(self) -> int:
        """Of its weights in fp32."""
        return 4 * self.parameters

    def to_json(self) -> dict[str, Any]:
        cases = [
            {
                **asdict(case),
                "percentiles": case.percentiles,
                "texts_per_second": case.per_second,
            }
            for case in self.cases
        ]
        more = {"metric": self.metric.name, "file_bytes": self.file_bytes, "cases": cases}
        return {**vars(self), **more}


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: dict[str, PreTrainedModel] = {}
    for name in record["models"]:
        if name != START and name not in recipe.from_files:
            progress(f"Loading {name} ...")
            loaded[name] = load_trained(recipe, run, record["task"], name).eval().to(device)
    if not loaded:
        raise UserError(f"{folder}: this run has evaluated no model that has weights.")
    longest = recipe.tasks_by_name[record["task"]].max_length
    cases: dict[str, list[Case]] = {name: [] for name in loaded}
    for batch in BATCHES:
        for length in sorted({*(n for n in LENGTHS if n < longest), longest}):
            progress(f"Measuring batches of {batch}, {length} tokens each ...")
            for name, case in measure(loaded, batch, length, device, SECONDS).items():
                cases[name].append(case)
    metric = task_metric_of(record)
    return [
        ProfiledModel(
            name,
            record["models"][name]["role"],
            sum(parameter.numel() for parameter in model.parameters()),
            metric,
            record["models"][name].get(metric.name),
            cases[name],
        )
        for name, model in loaded.items()
    ]


def models_text(models: Sequence[ProfiledModel]) -> str:
    """Size, latency and throughput of finished models, and how many times the largest teacher's
    they are."""
    return "\n\n".join(table.text() for table in _tables(models)) + "\n"


def _tables(models: Sequence[ProfiledModel]) -> Iterator[Table]:
    largest = max(models, key=lambda model: model.parameters)
    yield Table(
        f"Size, against the largest, {largest.name}",
        ["model", "parameters", "file", "times smaller", models[0].metric.name],
        [
            [
                model.name,
                f"{model.parameters / 1e6:.1f} M",
                f"{model.file_bytes / 1e6:.1f} MB",
                f"{largest.parameters / model.parameters:.1f}",
                "" if model.score is None else f"{model.score:.3f}",
            ]
            for model in models
        ],
    )
    for number, first in enumerate(models[0].cases):
        on_gpu = ["GiB"] if first.peak is not None else []
        cases = [(model.name, model.cases[number]) for model in models]
        slowest = largest.cases[number].median
        yield Table(
            f"Batch of {first.batch}, {first.length} tokens each; milliseconds of a batch",
            ["model", "p50", "p90", "p99", "batches", "texts/s", "times faster", *on_gpu],
            [
                [
                    name,
                    *map(milliseconds, case.percentiles),
                    str(case.repeats),
                    f"{case.per_second:,.1f}",
                    f"{slowest / case.median:.2f}",
                    *(gib(case.peak) for _ in on_gpu),
                ]
                for name, case in cases
            ],
        )


_COLOURS = {"teacher": "tab:blue", "student": "tab:orange", "control": "tab:green"}


def plot_models(models: Sequence[ProfiledModel], path: Path) -> None:
    """Quality against latency. Raises UserError where no model has a score."""
    metric = models[0].metric
    factor = 100 if metric.is_share() else 1
    scores = {model.name: factor * model.score for model in models if model.score is not None}
    if not scores:
        raise UserError(f"--figure {path}: the run's evaluate phase gave no scores.")
    cases = {
        model.name: max((c for c in model.cases if c.batch == 1), key=lambda case: case.length)
        for model in models
    }
    with new_figure(path, (7.5, 4.5)) as [axis]:
        for role, colour in _COLOURS.items():
            named = [model.name for model in models if model.role == role and model.name in scores]
            times = [1e3 * cases[name].median for name in named]
            axis.scatter(times, [scores[name] for name in named], color=colour, label=role)
            for name, at in zip(named, times, strict=True):
                beside = {"textcoords": "offset points", "xytext": (6, 4), "fontsize": 8}
                axis.annotate(name, (at, scores[name]), **beside)
        axis.set_ylim(of_scores(scores.values(), in_percent=metric.is_share()))
        axis.set_xlim(0, 1.3e3 * max(cases[name].median for name in scores))
        longest = next(iter(cases.values())).length
        axis.set_xlabel(f"median milliseconds of one text of {longest} tokens")
        axis.set_ylabel(metric.title + (", %" if metric.is_share() else ""))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
