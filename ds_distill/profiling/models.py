"""Latency, throughput and size of a finished run's models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_distill.errors import UserError
from ds_distill.planning.units import gib, milliseconds
from ds_distill.recipe import load_recipe
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


ProfiledModel = dict[str, Any]
"""Its `name`, `role`, `parameters`, `file_bytes` of its weights in fp32, `metric` and `score` on
the split that the run's evaluate phase names, None where it has none; and its `cases`."""


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
    sizes = {name: sum(one.numel() for one in model.parameters()) for name, model in loaded.items()}
    return [
        {
            "name": name,
            "role": record["models"][name]["role"],
            "parameters": size,
            "file_bytes": 4 * size,
            **{"over": record["over"], "metric": record["metric"]},
            "score": record["models"][name].get(record["metric"]),
            "cases": [_as_json(case) for case in cases[name]],
        }
        for name, size in sizes.items()
    ]


def _as_json(case: Case) -> dict[str, Any]:
    more = {"percentiles": case.percentiles, "texts_per_second": case.per_second}
    return {**asdict(case), **more}


def models_tables(models: Sequence[ProfiledModel]) -> Iterator[Table]:
    """Size, latency and throughput of finished models, and how many times the largest teacher's
    they are."""
    largest = max(models, key=lambda model: model["parameters"])
    yield Table(
        f"Size, against the largest, {largest['name']}",
        ["model", "parameters", "file", "times smaller", models[0]["metric"]],
        [
            [
                model["name"],
                f"{model['parameters'] / 1e6:.1f} M",
                f"{model['file_bytes'] / 1e6:.1f} MB",
                f"{largest['parameters'] / model['parameters']:.1f}",
                "" if model["score"] is None else f"{model['score']:.3f}",
            ]
            for model in models
        ],
    )
    for number, first in enumerate(models[0]["cases"]):
        on_gpu = ["GiB"] if first["peak"] is not None else []
        cases = [(model["name"], model["cases"][number]) for model in models]
        slowest, *_ = largest["cases"][number]["percentiles"]
        yield Table(
            f"Batch of {first['batch']}, {first['length']} tokens each; milliseconds of a batch",
            ["model", "p50", "p90", "p99", "batches", "texts/s", "times faster", *on_gpu],
            [
                [
                    name,
                    *map(milliseconds, case["percentiles"]),
                    str(len(case["seconds"])),
                    f"{case['texts_per_second']:,.1f}",
                    f"{slowest / case['percentiles'][0]:.2f}",
                    *(gib(case["peak"]) for _ in on_gpu),
                ]
                for name, case in cases
            ],
        )


_COLOURS = {"teacher": "tab:blue", "student": "tab:orange", "control": "tab:green"}


def plot_models(models: Sequence[ProfiledModel], path: Path) -> None:
    """Quality against latency. Raises UserError where no model has a score."""
    metric = task_metric_of(models[0])
    factor = 100 if metric.is_share() else 1
    scores = {one["name"]: factor * one["score"] for one in models if one["score"] is not None}
    if not scores:
        raise UserError(f"--figure {path}: the run's evaluate phase gave no scores.")
    cases = [
        max((c for c in m["cases"] if c["batch"] == 1), key=itemgetter("length")) for m in models
    ]
    times = {m["name"]: 1e3 * c["percentiles"][0] for m, c in zip(models, cases, strict=True)}
    with new_figure(path, (7.5, 4.5)) as [axis]:
        for role, colour in _COLOURS.items():
            named = [one["name"] for one in models if one["role"] == role and one["name"] in scores]
            at = [(times[name], scores[name]) for name in named]
            axis.scatter(*zip(*at, strict=True) if at else ([], []), color=colour, label=role)
            for name, position in zip(named, at, strict=True):
                beside = {"textcoords": "offset points", "xytext": (6, 4), "fontsize": 8}
                axis.annotate(name, position, **beside)
        axis.set_ylim(of_scores(scores.values(), in_percent=metric.is_share()))
        axis.set_xlim(0, 1.3 * max(times[name] for name in scores))
        axis.set_xlabel(f"median milliseconds of one text of {cases[0]['length']} tokens")
        axis.set_ylabel(metric.title + (", %" if metric.is_share() else ""))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
