"""What the runs of a sweep found, setting by setting, and those of a suite, by task and
checkpoint: JSON objects, which results.json holds and `tables` shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ds_distill.evaluation.bootstrap import mean_interval, resampled, variance_of_examples
from ds_distill.reporting.results import evaluation_of_student, task_metric_of, trained_models
from ds_distill.sweep.runs import Variant
from ds_distill.sweep.side_by_side import evaluations

Found = dict[str, Any]
"""What is known of a run, a setting or a checkpoint, as JSON has it."""

JUDGED_BY = ("over", "metric", "metric_settings", "split")
"""What of an evaluation's record a run's result and a summary have, too."""


def run_result(results: Found) -> Found:
    """Of a run's results.json: the shipped student, and the scores of all models where it was
    evaluated; see `evaluation_of_student`. `student` is None where it was not."""
    record, student = evaluation_of_student(results), results["student"]
    if record is None:
        return {"student": None, "seconds": results["seconds"]}
    metric, name = task_metric_of(record), record["metric"]
    baseline, models = record["baseline"], record["models"]
    own = [one["choosing"] for one in trained_models(results) if one["output"] == student]
    # Scores on two tasks do not choose for each other.
    choosing = own[-1] if record["task"] == results["task"] else None
    return {
        "student": student,
        **{key: value for key, value in record.items() if key in JUDGED_BY},
        "models": {
            model: {"role": numbers["role"], "score": numbers[name]}
            for model, numbers in models.items()
        },
        "majority": baseline[name],
        "rule": baseline["rule"],
        "chooses": choosing is not None,
        # Whether it is better than the baseline beyond chance; None where that has no score.
        "learnt": None
        if baseline[name] is None
        else metric.better(models[student]["to_baseline"]["interval"]),
        "choosing": None if choosing is None else choosing["score"],
        "seconds": results["seconds"],
    }


# ------------------------------------------------------------------- numbers of several seeds


@dataclass(frozen=True)
class Drawn:
    """The score of a run's student on draws of the test examples."""

    mark: str
    """The same for runs that were judged on the same examples, in the same groups."""
    scores: np.ndarray
    """float64 [R], see `resampled`."""


Draws = Callable[[Variant, str], Drawn | None]
"""Of a student of a run; None where its predictions are not there."""

Value = tuple[float | None, Drawn | None]
"""A score, None where it is undefined, and that on draws of the test examples."""


def drawn(folder: Path, student: str) -> Drawn | None:
    """Of a student of a run, where the shipped one was judged, see `evaluation_of_student`; None
    where its predictions are gone."""
    one = next((one for one in evaluations(folder, "") if one.stands_for_run), None)
    if one is None or (saved := one.saved) is None or student not in saved.models:
        return None
    scores = resampled(saved.models[student], one.metric, groups=saved.groups)
    groups = np.unique(saved.groups, return_inverse=True)[1]
    return Drawn(f"{one.examples} {xxhash.xxh3_64_hexdigest(groups.tobytes())}", scores)


def examples_of(draws: Sequence[Drawn | None]) -> float | None:
    """The `variance_of_examples` of numbers that differ in their seeds; None where they are not all
    over the same draws."""
    known = [one for one in draws if one is not None]
    if not known or len(known) < len(draws) or len({one.mark for one in known}) > 1:
        return None
    return variance_of_examples(np.stack([one.scores for one in known], axis=1))


def over_seeds(values: Sequence[float | None], examples: float | None = None) -> Found:
    """Values of several seeds, their `mean` and its `interval`: None where a value is missing.
    `over` says what the interval is over: seeds, examples or both.

    examples: see `variance_of_examples`.
    """
    given = [value for value in values if value is not None]
    whole = bool(given) and len(given) == len(values)
    of_seeds, of_examples = len(given) > 1, examples is not None
    return {
        "values": list(values),
        "mean": statistics.fmean(given) if whole else None,
        "interval": mean_interval(given, examples) if whole else None,
        "over": ["seeds"] * of_seeds + ["examples"] * of_examples if whole else [],
        "variance_of_examples": examples if whole else None,
    }


def _numbers(values: Sequence[Value]) -> Found:
    return over_seeds([score for score, _ in values], examples_of([draws for _, draws in values]))


def _less(one: Value, other: Value) -> Value:
    """A difference of the same seed, which decides something of both, on the same test examples."""
    (score, ours), (less, theirs) = one, other
    apart = None if score is None or less is None else score - less
    if ours is None or theirs is None or ours.mark != theirs.mark:
        return apart, None
    return apart, Drawn(ours.mark, ours.scores - theirs.scores)


# --------------------------------------------------------------------------------- a sweep


def no_draws(variant: Variant, student: str) -> Drawn | None:
    """Where no run's predictions are there."""
    return None


def summary(runs: Mapping[Variant, Found], draws: Draws = no_draws) -> Found:
    """Settings in the order of the runs: scores by seed, their mean and its interval, and the
    difference to the first setting over the seeds that both have. `chosen` is the setting with the
    best mean on the examples that choose, not on those that judge, of those with most seeds: the
    mean of fewer may be their luck. None where those examples are missing. A setting without a mean
    there, because a score is undefined, is ranked last: it is chosen by no means.

    `score` and `to_first` of a setting are of the students that its runs ship, and `others` has
    both of each other student, its difference to the same one under the first setting."""
    settings: dict[tuple[str, ...], dict[Variant, Found]] = {}
    for variant, run in runs.items():
        if run["student"] is not None:
            settings.setdefault(variant.setting, {})[variant] = run
    first = next(iter(settings.values()), {})
    rows = [_row(setting, own, first, draws) for setting, own in settings.items()]
    short = lacking(rows)
    choosing = {
        number: row["choosing"]["mean"]
        for number, row in enumerate(rows)
        if row["choosing"]["mean"] is not None and row not in short
    }
    one = next(iter(first.values()), {})
    complete = bool(choosing) and all(row["chooses"] for row in rows)
    return {
        **{key: one.get(key) for key in (*JUDGED_BY, "rule")},
        "settings": rows,
        "chosen": task_metric_of(one).best(choosing) if complete else None,
    }


def _row(
    setting: tuple[str, ...],
    own: Mapping[Variant, Found],
    first: Mapping[Variant, Found],
    draws: Draws,
) -> Found:
    """own, first: the runs of this setting and of the first one."""
    runs = own.values()
    roles = {name: one["role"] for run in runs for name, one in run["models"].items()}
    shipped = [run["student"] for run in runs]

    def of_student(name: str | None) -> Found:
        """name: None for the students that the runs ship."""
        values, theirs = (_by_seed(each, name, draws) for each in (own, first))
        numbers = {"score": _numbers([*values.values()])}
        if own is not first and theirs:
            apart = [_less(values[seed], theirs[seed]) for seed in values if seed in theirs]
            numbers["to_first"] = _numbers(apart)
        return numbers

    return {
        "setting": list(setting),
        "seeds": [variant.seed for variant in own],
        "students": shipped,
        "chooses": all(run["chooses"] for run in runs),
        "choosing": over_seeds([run["choosing"] for run in runs]),
        "majority": [run["majority"] for run in runs],
        "learnt": [run["learnt"] for run in runs],
        "models": {
            name: {"role": role, **over_seeds([_score(run, name) for run in runs])}
            for name, role in roles.items()
        },
        "seconds": [run["seconds"] for run in runs],
        **of_student(None),
        "others": {
            name: of_student(name)
            for name, role in roles.items()
            if role == "student" and {*shipped} != {name}
        },
    }


def _score(run: Found, model: str) -> float | None:
    score: float | None = run["models"].get(model, {}).get("score")
    return score


def _by_seed(
    runs: Mapping[Variant, Found], student: str | None, draws: Draws
) -> dict[str | None, Value]:
    """Of a student of a setting's runs, or of the one that each ships; nothing where none has
    it."""
    if student is not None and not any(student in run["models"] for run in runs.values()):
        return {}
    shipped = {variant: student or run["student"] for variant, run in runs.items()}
    return {v.seed: (_score(runs[v], one), draws(v, one)) for v, one in shipped.items()}


def students_of(setting: Found) -> list[tuple[str, Found]]:
    """The students of a setting, the shipped one first, each with its `score` and `to_first`. Where
    the runs ship several, these are named."""
    others = list(setting["others"].items())
    shipped = ", ".join(dict.fromkeys(setting["students"])) + (" (shipped)" if others else "")
    return [(shipped, setting), *others]


def setting_name(row: Found) -> str:
    return ", ".join(row["setting"]) or "the recipe's"


def undefined_settings(rows: Sequence[Found]) -> list[str]:
    """The settings that are ranked last: the score of a student of theirs on the examples that
    choose is undefined."""
    last = [row for row in rows if row["chooses"] and row["choosing"]["mean"] is None]
    return [setting_name(row) for row in last]


def lacking(rows: Sequence[Found]) -> list[Found]:
    """The settings that have fewer seeds than others."""
    most = max((len(row["seeds"]) for row in rows), default=0)
    return [row for row in rows if len(row["seeds"]) < most]


# --------------------------------------------------------------------------------- a suite


def suite_results(
    runs: Sequence[Variant],
    ended: Mapping[Variant, Found],
    reference: str,
    weights: Mapping[str, Mapping[str, float]],
    draws: Draws = no_draws,
) -> Found:
    """`tasks`: a sweep over the checkpoints for each, every one under the setting that the examples
    that choose have chosen, and the sweep over the grid that it was chosen from. `checkpoints`: the
    means over the tasks.

    runs: of `suite_runs`; ended: the `run_result` of each that has ended.
    reference: the checkpoint that the others are compared with, the first of each task.
    weights: of the tasks in each mean.
    draws: of the runs; asked for only where a setting is chosen.
    """
    by_task = {task: dict(_grouped(of, 1)) for task, of in _grouped(runs, 0)}
    tasks = {task: _task(of, ended, reference, draws) for task, of in by_task.items()}
    names = [name for name, _ in _grouped(runs, 1)]
    means = {kind: _means(tasks, names, reference, of) for kind, of in weights.items()}
    checkpoints = {name: {kind: of[name] for kind, of in means.items()} for name in names}
    return {"reference": reference, "tasks": tasks, "checkpoints": checkpoints}


def _grouped(runs: Sequence[Variant], position: int) -> Iterator[tuple[str, list[Variant]]]:
    """By task, at position 0, or by checkpoint."""
    for about in dict.fromkeys(run.overrides[position] for run in runs):
        own = [run for run in runs if run.overrides[position] == about]
        yield about.partition("=")[2], own


def _task(
    by_checkpoint: Mapping[str, Sequence[Variant]],
    ended: Mapping[Variant, Found],
    reference: str,
    draws: Draws,
) -> Found:
    """Only settings of which all seeds have ended are chosen."""
    grids: dict[str, Found] = {}
    chosen: dict[Variant, Variant] = {}  # without the task -> the run
    for name in dict.fromkeys([reference, *by_checkpoint]):
        own = by_checkpoint[name]
        failed = {run.setting for run in own if run not in ended}
        whole = {Variant(r.overrides[2:]): ended[r] for r in own if r.setting not in failed}
        grids[name] = grid = summary(whole)
        if grid["chosen"] is not None:
            setting = grid["settings"][grid["chosen"]]["setting"]
            taken = [run for run in own if [*run.setting[2:]] == setting]
            chosen |= {Variant(run.overrides[1:]): run for run in taken}
    compared = summary(
        {short: ended[run] for short, run in chosen.items()},
        lambda short, student: draws(chosen[short], student),
    )
    del compared["chosen"]  # of checkpoints none is
    return {**compared, "grids": grids}


def of_checkpoint(task: Found, name: str) -> Found | None:
    """A checkpoint's row of a task; None where no setting of it could be chosen."""
    rows = task["settings"]
    return next((row for row in rows if row["setting"][0] == f"checkpoint={name}"), None)


def _means(
    tasks: Found, names: Sequence[str], reference: str, weights: Mapping[str, float]
) -> dict[str, Found]:
    """By checkpoint the weighted mean over the tasks, seed by seed, what part of the reference's it
    is, and what it is less that; None where a task has no score of the checkpoint, one that is
    undefined, or one that is no share, or of which less is better. The tasks' test examples are
    drawn apart, so their variances add up."""

    def over_tasks(name: str, key: str) -> Found | None:
        found, variances = [], []
        for task, of in tasks.items():
            numbers = (of_checkpoint(of, name) or {}).get(key)
            if numbers is None or None in numbers["values"]:
                return None
            metric, examples = task_metric_of(of), numbers["variance_of_examples"]
            if not (metric.is_share() and metric.higher_is_better):
                return None
            found.append([weights[task] * value for value in numbers["values"]])
            variances.append(math.nan if examples is None else weights[task] ** 2 * examples)
        variance, by_seed = sum(variances), map(math.fsum, zip(*found, strict=True))
        return over_seeds([*by_seed], None if math.isnan(variance) else variance)

    means = {name: over_tasks(name, "score") for name in names}
    whole = means[reference]
    known = whole is not None and whole["mean"] > 0
    return {
        name: {
            "score": mean,
            "retention": mean["mean"] / whole["mean"] if mean and whole and known else None,
            "to_reference": over_tasks(name, "to_first") if whole else None,
        }
        for name, mean in means.items()
    }
