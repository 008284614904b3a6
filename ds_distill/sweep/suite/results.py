"""What the runs of a suite found, by task and checkpoint."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_distill.evaluation.scores import retention
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.result_tables import wide_note
from ds_distill.sweep.grid import Variant
from ds_distill.sweep.resampling import Drawn, Draws, examples_of
from ds_distill.sweep.suite.runs import SuiteRun
from ds_distill.sweep.table import (
    difference,
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
    runs: Sequence[SuiteRun],
    ended: Mapping[Variant, dict[str, Any]],
    reference: str,
    draws: Draws = no_draws,
    of_groups: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Scores by task and checkpoint, under the setting that the examples that choose have chosen.

    ended: the `run_result` of each run that has ended. A setting that lacks a seed is not chosen.
    reference: the checkpoint that the others are compared with.
    draws: of the runs; asked for only where a setting is chosen.
    of_groups: what each task counts in the macro mean, if there is one.
    """
    tasks = {
        task: _task([run for run in runs if run.task == task], ended, reference, draws)
        for task in dict.fromkeys(run.task for run in runs)
    }
    names = list(dict.fromkeys(run.checkpoint for run in runs))
    found = {"reference": reference, "tasks": tasks}
    of_each = dict.fromkeys(tasks, 1 / len(tasks)) if tasks else {}
    checkpoints = {name: _mean(name, tasks, reference, of_each) for name in names}
    if of_groups is not None:
        for name, of in checkpoints.items():
            of["macro"] = _mean(name, tasks, reference, of_groups)
    return {**found, "checkpoints": checkpoints}


def _task(
    runs: Sequence[SuiteRun],
    ended: Mapping[Variant, dict[str, Any]],
    reference: str,
    draws: Draws,
) -> dict[str, Any]:
    seeds = len({run.variant.seed for run in runs})
    found: dict[str, dict[str, Any]] = {}
    undefined: dict[str, list[str]] = {}
    drawn: dict[str, dict[str | None, Drawn | None]] = {}
    for name in dict.fromkeys(run.checkpoint for run in runs):
        own = {
            run.grid: ended[run.variant]
            for run in runs
            if run.checkpoint == name and run.variant in ended
        }
        counts = [variant.setting for variant in own]
        whole = {v: result for v, result in own.items() if counts.count(v.setting) == seeds}
        summed = summary(whole)
        undefined[name] = undefined_settings(summed["settings"])
        if summed["chosen"] is not None:
            row = summed["settings"][summed["chosen"]]
            drawn[name] = {
                run.grid.seed: draws(run.variant, ended[run.variant]["student"])
                for run in runs
                if run.checkpoint == name and list(run.grid.setting) == row["setting"]
            }
            row["score"] = over_seeds(row["score"]["values"], examples_of([*drawn[name].values()]))
            found[name] = {**summed, "row": row}
    if not found:
        return {"metric": None, "undefined": undefined, "checkpoints": {}}
    first = next(iter(found.values()))
    metric = metric_class(first)
    rows = {name: each.pop("row") for name, each in found.items()}
    for name, row in rows.items():
        found[name] |= {"score": row["score"], "retention": None, "to_reference": None}
        if reference in rows:
            other = rows[reference]
            means = row["score"]["mean"], other["score"]["mean"]
            found[name]["retention"] = retention(metric, *means)
            if name != reference:
                apart = difference(row, other, drawn[name], drawn[reference])
                found[name]["to_reference"] = apart
    about = {key: first[key] for key in ("metric", "split")}
    majority = rows[next(iter(rows))]["majority"]["mean"]
    return {**about, "majority": majority, "undefined": undefined, "checkpoints": found}


def _mean(
    name: str,
    tasks: Mapping[str, dict[str, Any]],
    reference: str,
    weights: Mapping[str, float],
) -> dict[str, Any]:
    """The weighted mean over the tasks, seed by seed; None where a task has no score of the
    checkpoint, one that is undefined, or one that is no share, or of which less is better. The
    tasks' test examples are drawn apart, so their variances add up."""
    own, other = _by_seed(name, tasks, weights), _by_seed(reference, tasks, weights)
    mean = over_seeds(own, _variance(name, tasks, weights, "score")) if own else None
    known = mean is not None and bool(other) and statistics.fmean(other) > 0
    apart = None
    if own and other and name != reference:
        differences = [a - b for a, b in zip(own, other, strict=True)]
        apart = over_seeds(differences, _variance(name, tasks, weights, "to_reference"))
    return {
        "mean": mean,
        "retention": statistics.fmean(own) / statistics.fmean(other) if known else None,
        "to_reference": apart,
    }


def _variance(
    name: str, tasks: Mapping[str, dict[str, Any]], weights: Mapping[str, float], key: str
) -> float | None:
    """Of the weighted mean, by other test examples; None where it is not known of a task."""
    numbers = {
        task: of["checkpoints"][name][key]["variance_of_examples"] for task, of in tasks.items()
    }
    if None in numbers.values():
        return None
    return float(sum(weights[task] ** 2 * number for task, number in numbers.items()))


def _by_seed(
    name: str, tasks: Mapping[str, dict[str, Any]], weights: Mapping[str, float]
) -> list[float]:
    scores = []
    for task in tasks.values():
        if name not in task["checkpoints"]:
            return []
        metric = metric_class(task)
        if not (metric.is_share() and metric.higher_is_better):
            return []
        scores.append(task["checkpoints"][name]["score"]["values"])
        if None in scores[-1]:
            return []
    each = [weights[task] for task in tasks]
    return [
        math.fsum(weight * score for weight, score in zip(each, of_seed, strict=True))
        for of_seed in zip(*scores, strict=True)
    ]


# ---------------------------------------------------------------------------------- as tables


def suite_tables(found: dict[str, Any]) -> Iterator[Table]:
    """Scores; differences to the reference; the settings that were chosen."""
    tasks, reference = found["tasks"], found["reference"]
    metrics = {task: metric_class(of) for task, of in tasks.items() if of["metric"] is not None}
    heads = [f"{task}, {metric.title}" for task, metric in metrics.items()]
    means = ["mean", *(["macro mean"] if "macro" in found["checkpoints"][reference] else [])]
    yield Table(
        "Scores",
        ["checkpoint", *heads, *means, f"of {reference}'s"],
        [
            *(_scores(name, of, metrics, tasks) for name, of in found["checkpoints"].items()),
            [
                "the baseline",
                *(metric.shown_as(tasks[task]["majority"]) for task, metric in metrics.items()),
                *("" for _ in means),
                "",
            ],
        ],
        [
            *learnt_notes(_chosen(found)),
            *interval_notes([of["score"] for _, of in _chosen(found)]),
            "The setting was chosen by task and checkpoint, on the examples that choose. The "
            "baseline is the best that can be answered without reading a text, as the most "
            "frequent class. The last column is of the mean over tasks"
            + (", the macro mean that over groups of tasks." if len(means) > 1 else "."),
        ],
    )
    others = [name for name in found["checkpoints"] if name != reference]
    if others:
        rows = [_differences(name, found, metrics) for name in others]
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
    yield _settings_table(tasks, metrics)


def _settings_table(tasks: dict[str, Any], metrics: dict[str, MetricClass]) -> Table:
    return Table(
        "Settings that were chosen",
        ["task", "checkpoint", "setting", "choosing", "by seed"],
        [
            [
                task,
                name,
                ", ".join(of["settings"][of["chosen"]]["setting"]),
                metric.shown_as(of["settings"][of["chosen"]]["choosing"]["mean"]),
                " ".join(map(metric.shown_as, of["score"]["values"])),
            ]
            for task, metric in metrics.items()
            for name, of in tasks[task]["checkpoints"].items()
        ],
        [
            f"Undefined, and ranked last, {task}, {name}: {'; '.join(settings)}."
            for task in metrics
            for name, settings in tasks[task]["undefined"].items()
            if settings
        ],
    )


def _chosen(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The setting that was chosen for each task and checkpoint."""
    return [
        (f"{name} on {task}", {**of["settings"][of["chosen"]], "score": of["score"]})
        for task, each in found["tasks"].items()
        for name, of in each["checkpoints"].items()
    ]


def _scores(
    name: str,
    of: dict[str, Any],
    metrics: Mapping[str, MetricClass],
    tasks: Mapping[str, dict[str, Any]],
) -> list[str | Cell]:
    scores = [
        shown(tasks[task]["checkpoints"][name]["score"], metric.shown_as)
        if name in tasks[task]["checkpoints"]
        else metric.shown_as(None)
        if tasks[task]["undefined"][name]
        else "-"
        for task, metric in metrics.items()
    ]
    means = [
        "-" if each["mean"] is None else shown(each["mean"], "{:.1%}".format)
        for each in (of, *([of["macro"]] if "macro" in of else []))
    ]
    retention = "-" if of["retention"] is None else f"{of['retention']:.1%}"
    return [name, *scores, *means, retention]


def _differences(
    name: str, found: dict[str, Any], metrics: Mapping[str, MetricClass]
) -> list[str | Cell]:
    cells: list[str | Cell] = [name]
    for task, metric in metrics.items():
        numbers = found["tasks"][task]["checkpoints"].get(name, {}).get("to_reference")
        if numbers is None:
            cells.append("-")
            continue
        score = found["tasks"][task]["checkpoints"][name]["score"]["mean"]
        cells.append(to_first(metric, numbers, score))
    of, any_share = found["checkpoints"][name], next(iter(metrics.values()), None)
    for each in (of, *([of["macro"]] if "macro" in of else [])):
        apart = each["to_reference"]
        if apart is None or any_share is None:
            cells.append("-")
        else:
            cells.append(to_first(any_share, apart, None))
    return cells
