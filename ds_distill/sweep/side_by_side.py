"""Finished runs side by side: their models on the same examples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ds_distill.data.groups import components
from ds_distill.errors import UserError
from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.scores import difference
from ds_distill.planning.units import duration
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.metric import Metric
from ds_distill.recipe.phases import PHASES
from ds_distill.records import read_results
from ds_distill.reporting.result_tables import difference_cell, wide_note
from ds_distill.reporting.results import (
    answer_of,
    evaluation_of_student,
    evaluations_of_student,
    limits_of,
    settings_note,
    task_metric_of,
    undefined_note,
)
from ds_distill.run.folder import RunFolder
from ds_distill.tables import Cell, Table

_SHOWN = ("role", "to_baseline", "parameters", "examples", "not_given", "knows")
"""What a row has of a model's numbers, where they have it."""


@dataclass(frozen=True)
class Evaluation:
    """The record of an evaluate phase of a run."""

    run: str
    """As the tables call it."""
    record: dict[str, Any]
    student: str | None
    """The shipped one; None where it was trained again since."""
    stands_for_run: bool
    """Whether it is the `evaluation_of_student`."""
    seconds: float
    """Of the whole run."""
    predictions: Path

    @property
    def examples(self) -> str:
        """The same for evaluations that are set in one table."""
        of = (self.record[k] for k in ("metric", "metric_settings", "split", "examples_mark"))
        return json.dumps(list(of), sort_keys=True)

    @property
    def main(self) -> str:
        """The model that stands for the run: the student that it ships, else its first of those
        that were judged on all examples."""
        models = self.record["models"]
        if self.student in models:
            return self.student  # type: ignore[return-value]
        return next(iter(sorted(models, key=lambda name: "not_given" in models[name])))

    @cached_property
    def saved(self) -> SavedPredictions | None:
        """None where the file is gone."""
        if not self.predictions.is_file():
            return None
        return SavedPredictions.read(self.predictions, self.record["over"])

    @property
    def metric(self) -> Metric[Any]:
        """The task's metric. Its predictions must be there."""
        assert self.saved is not None
        metric = METRICS[self.record["over"]][self.record["metric"]]
        return metric(metric.Settings(**self.record["metric_settings"]), self.saved.labels)


def evaluations(folder: Path, name: str) -> Iterator[Evaluation]:
    """Those of a finished run; name: as tables call it. Raises UserError where there is none."""
    run = RunFolder(folder)
    if not run.results.is_file():
        raise UserError(
            f"{folder}: holds no results.json, so it is no finished run. Name folders of runs that "
            "have ended, or of `ds-distill evaluate --output`."
        )
    results, found = read_results(run.results), False
    as_shipped, last = evaluations_of_student(results), evaluation_of_student(results)
    for number, record in enumerate(results.get("phases", [])):
        if PHASES[record["kind"]].makes != "evaluation":
            continue
        found = True
        file = run.predictions(number, record["phase"])
        student = results["student"] if record in as_shipped else None
        yield Evaluation(name, record, student, record is last, results["seconds"], file)
    if not found:
        raise UserError(
            f"{folder}: this run has evaluated nothing. Evaluate its student: "
            f"ds-distill evaluate {folder} RECIPE --output FOLDER."
        )


def side_by_side(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """One entry for each set of examples that judged: `rows`, a model of a run each. Of a run that
    evaluated the same examples more than once, as after each of several phases, the last
    evaluation stands.

    `to_first` of a row is the difference to the first run's model on the same examples, with its
    paired interval; None where a run has no predictions.
    """
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    if len(set(names)) < len(names):
        raise UserError(f"{', '.join(names)}: a run is named twice. Name each once.")
    groups: dict[str, dict[str, Evaluation]] = {}  # examples -> run -> its last
    for folder, name in zip(folders, names, strict=True):
        for evaluation in evaluations(folder, name):
            groups.setdefault(evaluation.examples, {})[name] = evaluation
    return [_group([*group.values()]) for group in groups.values()]


def _group(group: list[Evaluation]) -> dict[str, Any]:
    first = group[0]
    rows = [
        {
            "run": one.run,
            "model": model,
            "score": numbers[first.record["metric"]],
            **{key: numbers[key] for key in _SHOWN if key in numbers},
            "run_seconds": one.seconds,
            "to_first": None if (one, model) == (first, first.main) else _paired(one, model, first),
        }
        for one in group
        for model, numbers in one.record["models"].items()
    ]
    about = {key: first.record[key] for key in ("split", "over", "metric", "metric_settings")}
    names = {"first": [first.run, first.main], "baseline": first.record["baseline"]}
    return {**about, **names, "rows": rows}


def _paired(one: Evaluation, model: str, first: Evaluation) -> dict[str, Any] | None:
    """The difference to the first run's model on the same examples, and its interval; None where
    one has no predictions, or was judged on some of the examples."""
    mine, theirs = one.saved, first.saved
    both = one.record["models"][model], first.record["models"][first.main]
    if mine is None or theirs is None or any("not_given" in numbers for numbers in both):
        return None
    groups = components(np.stack([mine.groups, theirs.groups], axis=1))
    return difference(mine.models[model], theirs.models[first.main], one.metric, groups)


# ---------------------------------------------------------------------------------- as tables


def side_tables(groups: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Of what `side_by_side` found: one each."""
    for group in groups:
        metric = task_metric_of(group)
        heads = ["run", "model", "role", metric.title, "to the baseline"]
        heads += [f"less {' '.join(group['first'])}", "parameters", "the run took"]
        rows: list[list[str | Cell]] = [
            [
                row["run"],
                row["model"] + limits_of(row),
                row["role"],
                metric.shown_as(row["score"]),
                difference_cell(metric, row["to_baseline"], row["score"]),
                _to_first(group, row),
                f"{row['parameters'] / 1e6:.1f} M" if row["parameters"] else "-",
                duration(row["run_seconds"]),
            ]
            for row in group["rows"]
        ]
        count = f"{group['baseline']['examples']:,} examples of {group['split']}"
        notes = [*_notes(group), *wide_note(metric, rows)]
        yield Table(f"{metric.heading()} on {count}", heads, rows, notes)


def _is_first(group: dict[str, Any], row: dict[str, Any]) -> bool:
    return [row["run"], row["model"]] == group["first"]


def _to_first(group: dict[str, Any], row: dict[str, Any]) -> str | Cell:
    if row["to_first"] is None:
        return "" if _is_first(group, row) else "not comparable"
    return difference_cell(task_metric_of(group), row["to_first"], row["score"])


def _notes(group: dict[str, Any]) -> Iterator[str]:
    metric, baseline = task_metric_of(group), group["baseline"]
    if note := settings_note(group):
        yield note
    yield (
        f"The baseline is always {answer_of(group)}: {metric.title} "
        f"{metric.shown_as(baseline[metric.name])}. "
        "In brackets: 95% intervals on the same examples, paired bootstrap; beyond chance where "
        "they exclude 0 (*). They do not include the effect of another seed."
    )
    if baseline.get("words_without_token"):
        yield (
            f"{baseline['words_without_token']:,} of the {baseline['words']:,} words have no token "
            "that all models of these runs read, and count as not found."
        )
    yield from undefined_note([baseline[metric.name], *(row["score"] for row in group["rows"])])
    [first] = [row for row in group["rows"] if _is_first(group, row)]
    without = [row for row in group["rows"] if row["to_first"] is None and row is not first]
    in_part = ["not_given" in row or "not_given" in first for row in without]
    if any(in_part):
        yield "Not comparable: judged on some of the examples alone, as (on N examples) says."
    if not all(in_part):
        yield "Not comparable: the folder `predictions` of a run is gone."
