"""What the runs of a suite found, by task and checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_distill.evaluation.scores import retention
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.result_tables import wide_note
from ds_distill.sweep.grid import SEED, Variant
from ds_distill.sweep.resampling import Draws
from ds_distill.sweep.table import (
    interval_notes,
    learnt_notes,
    metric_class,
    no_draws,
    over_seeds,
    shown,
    summary,
    to_first,
    undefined_settings,
)
from ds_distill.tables import Cell, Table


def suite_results(
    runs: Sequence[Variant],
    ended: Mapping[Variant, dict[str, Any]],
    reference: str,
    weights: Mapping[str, Mapping[str, float]],
    draws: Draws = no_draws,
) -> dict[str, Any]:
    """Scores by task and checkpoint, under the setting that the examples that choose have chosen.

    runs: of `suite_runs`; ended: the `run_result` of each that has ended.
    reference: the checkpoint that the others are compared with.
    weights: of the tasks in each mean.
    draws: of the runs; asked for only where a setting is chosen.
    """
    by_task = _grouped(runs, 0)
    tasks = {task: _task(each, ended, reference, draws) for task, each in by_task.items()}
    checkpoints: dict[str, Any] = {}
    for name in _grouped(runs, 1):
        means = {kind: _mean(name, tasks, reference, of) for kind, of in weights.items()}
        checkpoints[name] = {**means.pop("mean"), **means}
    return {"reference": reference, "tasks": tasks, "checkpoints": checkpoints}


def _grouped(runs: Sequence[Variant], position: int) -> dict[str, list[Variant]]:
    """By task, at position 0, or by checkpoint."""
    found: dict[str, list[Variant]] = {}
    for run in runs:
        found.setdefault(run.overrides[position].partition("=")[2], []).append(run)
    return found


def _task(
    runs: Sequence[Variant],
    ended: Mapping[Variant, dict[str, Any]],
    reference: str,
    draws: Draws,
) -> dict[str, Any]:
    """A sweep over the grid for each checkpoint, of the settings with all seeds; then one over the
    checkpoints, each under its chosen setting, the reference first."""
    found: dict[str, dict[str, Any]] = {}
    undefined: dict[str, list[str]] = {}
    chosen: dict[Variant, Variant] = {}  # checkpoint and seed -> its run
    by_checkpoint = _grouped(runs, 1)
    for name in sorted(by_checkpoint, key=lambda name: name != reference):
        own = by_checkpoint[name]
        failed = {run.setting for run in own if run not in ended}
        whole = {Variant(r.overrides[2:]): ended[r] for r in own if r.setting not in failed}
        summed = summary(whole)
        undefined[name] = undefined_settings(summed["settings"])
        if summed["chosen"] is not None:
            found[name] = summed
            setting = summed["settings"][summed["chosen"]]["setting"]
            chosen |= {
                Variant((f"checkpoint={name}", f"{SEED}={run.seed}")): run
                for run in own
                if [*run.setting[2:]] == setting
            }
    compared = summary(
        {short: ended[run] for short, run in chosen.items()},
        lambda short, student: draws(chosen[short], student),
    )
    rows = dict(zip(found, compared["settings"], strict=True))
    for name, row in rows.items():
        known = reference in rows
        found[name] |= {
            "score": row["score"],
            "retention": retention(
                metric_class(compared), row["score"]["mean"], rows[reference]["score"]["mean"]
            )
            if known
            else None,
            "to_reference": row.get("to_first") if known else None,
        }
    return {
        **{key: compared[key] for key in ("metric", "split")},
        "majority": next((row["majority"]["mean"] for row in rows.values()), None),
        "undefined": undefined,
        "checkpoints": {name: found[name] for name in by_checkpoint if name in found},
    }


def _mean(
    name: str, tasks: Mapping[str, Any], reference: str, weights: Mapping[str, float]
) -> dict[str, Any]:
    """The weighted mean over the tasks, seed by seed; None where a task has no score of the
    checkpoint, one that is undefined, or one that is no share, or of which less is better. The
    tasks' test examples are drawn apart, so their variances add up."""

    def over_tasks(name: str, key: str) -> dict[str, Any] | None:
        found, variances = [], []
        for task, of in tasks.items():
            numbers = of["checkpoints"].get(name, {}).get(key)
            if numbers is None or None in numbers["values"]:
                return None
            metric, examples = metric_class(of), numbers["variance_of_examples"]
            if not (metric.is_share() and metric.higher_is_better):
                return None
            found.append([weights[task] * value for value in numbers["values"]])
            variances.append(None if examples is None else weights[task] ** 2 * examples)
        known = [each for each in variances if each is not None]
        by_seed = map(math.fsum, zip(*found, strict=True))
        return over_seeds([*by_seed], sum(known) if len(known) == len(variances) else None)

    mean, other = over_tasks(name, "score"), over_tasks(reference, "score")
    known = mean is not None and other is not None and other["mean"] > 0
    return {
        "mean": mean,
        "retention": mean["mean"] / other["mean"] if mean and other and known else None,
        "to_reference": over_tasks(name, "to_reference"),
    }


# ---------------------------------------------------------------------------------- as tables

_BASELINE = (
    "The setting was chosen by task and checkpoint, on the examples that choose. The baseline is "
    "the best that can be answered without reading a text, as the most frequent class. The last "
    "column is of the mean over tasks"
)


def suite_tables(found: dict[str, Any]) -> Iterator[Table]:
    """Scores; differences to the reference; the settings that were chosen."""
    tasks, reference, checkpoints = found["tasks"], found["reference"], found["checkpoints"]
    metrics = {task: metric_class(of) for task, of in tasks.items() if of["metric"] is not None}
    chosen = [
        (task, name, {**of["settings"][of["chosen"]], "score": of["score"]})
        for task in metrics
        for name, of in tasks[task]["checkpoints"].items()
    ]
    means = ["mean", *(["macro mean"] if "macro" in checkpoints[reference] else [])]
    named = [(f"{name} on {task}", row) for task, name, row in chosen]
    rows = [
        [*_line(name, found, metrics, "score"), "-" if part is None else f"{part:.1%}"]
        for name, part in ((name, of["retention"]) for name, of in checkpoints.items())
    ]
    majority = (metric.shown_as(tasks[task]["majority"]) for task, metric in metrics.items())
    yield Table(
        "Scores",
        [
            "checkpoint",
            *(f"{task}, {metric.title}" for task, metric in metrics.items()),
            *means,
            f"of {reference}'s",
        ],
        [*rows, ["the baseline", *majority, *("" for _ in means), ""]],
        [
            *learnt_notes(named),
            *interval_notes([row["score"] for _, row in named]),
            _BASELINE + (", the macro mean that over groups of tasks." if means[1:] else "."),
        ],
    )
    if others := [name for name in checkpoints if name != reference]:
        rows = [_line(name, found, metrics, "to_reference") for name in others]
        yield Table(
            f"Less {reference}",
            ["checkpoint", *metrics, *means],
            rows,
            [
                "Points of shares, seed by seed, on the same test examples; *: beyond chance, the "
                "95% interval excludes 0.",
                *dict.fromkeys(note for e in metrics.values() for note in wide_note(e, rows)),
            ],
        )
    yield _settings(chosen, tasks, metrics)


def _settings(
    chosen: Sequence[tuple[str, str, dict[str, Any]]],
    tasks: Mapping[str, Any],
    metrics: Mapping[str, MetricClass],
) -> Table:
    return Table(
        "Settings that were chosen",
        ["task", "checkpoint", "setting", "choosing", "by seed"],
        [
            [
                task,
                name,
                ", ".join(row["setting"]),
                metrics[task].shown_as(row["choosing"]["mean"]),
                " ".join(map(metrics[task].shown_as, row["score"]["values"])),
            ]
            for task, name, row in chosen
        ],
        [
            f"Undefined, and ranked last, {task}, {name}: {'; '.join(settings)}."
            for task in metrics
            for name, settings in tasks[task]["undefined"].items()
            if settings
        ],
    )


def _line(
    name: str, found: dict[str, Any], metrics: Mapping[str, MetricClass], key: str
) -> list[str | Cell]:
    """A checkpoint's numbers of each task, and their means. key: `score` or `to_reference`."""

    def cell(metric: MetricClass, numbers: dict[str, Any], score: float | None) -> str | Cell:
        if key == "score":
            return shown(numbers, metric.shown_as)
        return to_first(metric, numbers, score)

    cells: list[str | Cell] = [name]
    for task, metric in metrics.items():
        of = found["tasks"][task]
        if (numbers := of["checkpoints"].get(name, {}).get(key)) is not None:
            score = of["checkpoints"][name]["score"]["mean"]
            cells.append(cell(metric, numbers, score))
        else:
            cells.append("undefined" if key == "score" and of["undefined"][name] else "-")
    of = found["checkpoints"][name]
    for each in (of, *([of["macro"]] if "macro" in of else [])):
        numbers = each["mean" if key == "score" else key]
        # A mean is of shares alone, which all are shown alike.
        share = next(iter(metrics.values()), None)
        cells.append("-" if numbers is None or share is None else cell(share, numbers, None))
    return cells
