"""Finished runs side by side: their models on the same examples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from ds_distill.reporting.result_tables import (
    difference_cell,
    evaluation_tables,
    judged_model,
    wide_note,
)
from ds_distill.reporting.results import (
    evaluation_of_student,
    evaluations_of_student,
    task_metric_of,
)
from ds_distill.run.folder import RunFolder
from ds_distill.tables import Cell, Table


@dataclass(frozen=True)
class Evaluation:
    """The record of an evaluate phase of a run."""

    run: str
    """As the tables call it."""
    record: Any
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
        """The model that stands for the run."""
        return judged_model(self.record, self.student)

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
    """One evaluation's record for each set of examples that judged, with models of all runs, called
    `RUN MODEL`. Of a run that evaluated the same examples more than once, as after each of several
    phases, the last evaluation stands.

    `to_first` of a model is the difference to `first`, the first run's model on the same examples,
    with its paired interval; None where a run has no predictions.
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
    models = {
        f"{one.run} {model}": {
            **numbers,
            **{"run": one.run, "model": model, "run_seconds": one.seconds},
            "to_first": None if (one, model) == (first, first.main) else _paired(one, model, first),
        }
        for one in group
        for model, numbers in one.record["models"].items()
    }
    return {
        **first.record,
        "comparisons": [],
        "models": models,
        "first": f"{first.run} {first.main}",
    }


def _paired(one: Evaluation, model: str, first: Evaluation) -> dict[str, Any] | None:
    """The difference to the first run's model on the same examples, and its interval; None where
    one has no predictions, or was judged on some of the examples."""
    mine, theirs = one.saved, first.saved
    both = one.record["models"][model], first.record["models"][first.main]
    if mine is None or theirs is None or any("not_given" in numbers for numbers in both):
        return None
    groups = components(np.stack([mine.groups, theirs.groups], axis=1))
    return difference(mine.models[model], theirs.models[first.main], one.metric, groups)


def side_table(group: Any) -> Table:
    """Of an entry of `side_by_side`: as of an evaluation of one run, with two columns more."""
    table, metric, first = next(evaluation_tables(group)), task_metric_of(group), group["first"]
    less: list[str | Cell] = []
    for name, model in group["models"].items():
        if (apart := model["to_first"]) is not None:
            less.append(difference_cell(metric, apart, model[metric.name]))
        else:
            less.append("" if name == first else "not comparable")
    took = [duration(model["run_seconds"]) for model in group["models"].values()]
    rows = [[*row, *more] for row, *more in zip(table.rows, [*less, ""], [*took, ""], strict=True)]
    notes = dict.fromkeys([*table.notes, *wide_note(metric, rows), *_not_compared(group)])
    return replace(
        table, heads=[*table.heads, f"less {first}", "the run took"], rows=rows, notes=[*notes]
    )


def _not_compared(group: dict[str, Any]) -> Iterator[str]:
    yield "Intervals do not include the effect of another seed."
    models, first = group["models"], group["first"]
    without = [one for name, one in models.items() if one["to_first"] is None and name != first]
    in_part = ["not_given" in one or "not_given" in models[first] for one in without]
    if any(in_part):
        yield "Not comparable: judged on some of the examples alone, as (on N examples) says."
    if not all(in_part):
        yield "Not comparable: the folder `predictions` of a run is gone."
