"""What the runs of a sweep found, setting by setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_distill.evaluation.seeds import mean_interval
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.intervals import interval_as
from ds_distill.reporting.result_tables import outcome_of, wide_note
from ds_distill.reporting.results import (
    evaluation_of_student,
    students_of,
    task_metric_of,
    trained_models,
    undefined_note,
)
from ds_distill.sweep.grid import Variant
from ds_distill.sweep.resampling import Drawn, Draws, examples_of
from ds_distill.tables import Cell, Table


def run_result(results: dict[str, Any]) -> dict[str, Any]:
    """Of a run's results.json: the shipped student, and the scores of all models where it was
    evaluated; see `evaluation_of_student`. `student` is None where it was not."""
    record = evaluation_of_student(results)
    if record is None:
        return {"student": None, "seconds": results["seconds"]}
    name, baseline = record["metric"], record["baseline"]
    trained = trained_models(results)
    choosing = [one["choosing"] for one in trained if one["output"] == results["student"]][-1]
    # Scores on two tasks do not choose for each other.
    choosing = choosing if record["task"] == results["task"] else None
    return {
        "student": results["student"],
        "metric": {"name": name, "over": record["over"], "settings": record["metric_settings"]},
        "split": record["split"],
        "models": {
            model: {"role": numbers["role"], "score": numbers[name]}
            for model, numbers in record["models"].items()
        },
        "majority": baseline[name],
        "rule": baseline["rule"],
        "chooses": choosing is not None,
        "learnt": _learnt(record, results["student"]),
        "choosing": None if choosing is None else choosing["score"],
        "seconds": results["seconds"],
    }


def _learnt(record: Mapping[str, Any], student: str) -> bool | None:
    """Whether a student is better than the baseline beyond chance; None where that has no score."""
    metric = task_metric_of(record)
    if record["baseline"][metric.name] is None:
        return None
    return metric.better(record["models"][student]["to_baseline"]["interval"])


def no_draws(variant: Variant, student: str) -> Drawn | None:
    """Where no run's predictions are there."""
    return None


def summary(runs: Mapping[Variant, dict[str, Any]], draws: Draws = no_draws) -> dict[str, Any]:
    """Settings in the order of the runs: scores by seed, their mean and its interval, and the
    difference to the first setting over the seeds that both have. `chosen` is the setting with the
    best mean on the examples that choose, not on those that judge, of those with most seeds: the
    mean of fewer may be their luck. None where those examples are missing. A setting without a mean
    there, because a score is undefined, is ranked last: it is chosen by no means.

    `score` and `to_first` of a setting are of the students that its runs ship, and `others` has
    both of each other student, its difference to the same one under the first setting."""
    found = {variant: run for variant, run in runs.items() if run["student"] is not None}
    settings: dict[tuple[str, ...], list[tuple[Variant, dict[str, Any]]]] = {}
    for variant, run in found.items():
        settings.setdefault(variant.setting, []).append((variant, run))
    rows = [_row(setting, each) for setting, each in settings.items()]
    made = [*settings.values()]
    for row, own in zip(rows, made, strict=True):
        for name in (None, *_other_students(row)):
            student = row if name is None else row["others"].setdefault(name, {})
            values = _student(own, name, draws)
            student |= {"seeds": row["seeds"], "score": _over_seeds([*values.values()])}
            if row is not rows[0] and (name is None or name in rows[0]["models"]):
                student["to_first"] = _difference(values, _student(made[0], name, draws))
    metric = metric_class(next(iter(found.values()))) if found else None
    short = lacking(rows)
    choosing = {
        number: row["choosing"]["mean"]
        for number, row in enumerate(rows)
        if row["choosing"]["mean"] is not None and row not in short
    }
    complete = bool(choosing) and all(row["chooses"] for row in rows)
    first = next(iter(found.values()), {})
    return {
        **{key: first.get(key) for key in ("metric", "split", "rule")},
        "settings": rows,
        "chosen": metric.best(choosing) if metric is not None and complete else None,
    }


def metric_class(of: Mapping[str, Any]) -> MetricClass:
    """Of a run's result, or a summary."""
    return task_metric_of({"over": of["metric"]["over"], "metric": of["metric"]["name"]})


def _row(
    setting: tuple[str, ...], runs: Sequence[tuple[Variant, dict[str, Any]]]
) -> dict[str, Any]:
    roles = {name: one["role"] for _, run in runs for name, one in run["models"].items()}
    return {
        "setting": list(setting),
        "seeds": [variant.seed for variant, _ in runs],
        "students": [run["student"] for _, run in runs],
        "chooses": all(run["chooses"] for _, run in runs),
        "choosing": over_seeds([run["choosing"] for _, run in runs]),
        "majority": over_seeds([run["majority"] for _, run in runs]),
        "learnt": [run["learnt"] for _, run in runs],
        "models": {
            name: {
                "role": role,
                **over_seeds([run["models"].get(name, {}).get("score") for _, run in runs]),
            }
            for name, role in roles.items()
        },
        "seconds": [run["seconds"] for _, run in runs],
        "others": {},
    }


def _other_students(row: dict[str, Any]) -> list[str]:
    """The students that are not those that all runs of a setting ship."""
    students = [name for name, model in row["models"].items() if model["role"] == "student"]
    return [name for name in students if {*row["students"]} != {name}]


_Value = tuple[float | None, Drawn | None]
"""A score, and that on draws of the test examples."""


def _student(
    runs: Sequence[tuple[Variant, dict[str, Any]]], name: str | None, draws: Draws
) -> dict[str | None, _Value]:
    """By seed, of a student of a setting's runs, or of the one that each ships."""
    found = {}
    for variant, run in runs:
        one = run["student"] if name is None else name
        found[variant.seed] = run["models"].get(one, {}).get("score"), draws(variant, one)
    return found


def _over_seeds(values: Sequence[_Value]) -> dict[str, Any]:
    return over_seeds([value for value, _ in values], examples_of([drawn for _, drawn in values]))


def _difference(
    ours: Mapping[str | None, _Value], theirs: Mapping[str | None, _Value]
) -> dict[str, Any]:
    """Over the seeds that both have: a seed's runs share what the seed decides, and all of them the
    test examples. None for a seed where a score is undefined."""
    pairs = [(*ours[seed], *theirs[seed]) for seed in ours if seed in theirs]
    return over_seeds(
        [None if a is None or b is None else a - b for a, _, b, _ in pairs],
        examples_of([drawn for _, drawn, _, _ in pairs], [drawn for *_, drawn in pairs]),
    )


def over_seeds(values: Sequence[float | None], examples: float | None = None) -> dict[str, Any]:
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


# ---------------------------------------------------------------------------------- as a table


def sweep_table(found: dict[str, Any]) -> Table:
    """The summary for a reader."""
    if not found["settings"]:
        return Table("", ["setting"], [], ["No run has a student that was evaluated."])
    metric = metric_class(found)
    several = len(found["settings"]) > 1
    heads = ["setting", "student", "runs", f"{metric.title} on {found['split']}", "by seed"]
    heads += ["choosing", *(["to the first"] if several else [])]
    rows: list[list[str | Cell]] = []
    for row in found["settings"]:
        choosing = shown({**row["choosing"], "interval": None}, metric.shown_as)
        for student, numbers in students_of(row):
            line: list[str | Cell] = [
                ", ".join(row["setting"]) or "the recipe's",
                student,
                str(len(row["seeds"])),
                shown(numbers["score"], metric.shown_as),
                " ".join(map(metric.shown_as, numbers["score"]["values"])),
                "" if numbers is not row else choosing if row["chooses"] else "-",
            ]
            if several:
                apart, mean = numbers.get("to_first"), numbers["score"]["mean"]
                line.append("" if apart is None else to_first(metric, apart, mean))
            rows.append(line)
    return Table("", heads, rows, [*_notes(found, metric), *wide_note(metric, rows)])


def to_first(metric: MetricClass, numbers: dict[str, Any], score: float | None) -> Cell:
    """A difference, with its interval where there is one.

    score: what it is from.
    """
    interval = numbers["interval"]
    outcome = outcome_of(metric, interval) if interval else ""
    wide = "?" if metric.too_wide(interval, score) else ""
    return Cell(shown(numbers, metric.difference_as) + wide, outcome)


def shown(numbers: dict[str, Any], form: Callable[[float | None], str]) -> str:
    """A mean, with its interval where there is one; `undefined` where a value is."""
    if not numbers["values"]:
        return "-"
    text = form(numbers["mean"])
    if numbers["interval"] is not None:
        text += f" ({interval_as(form, numbers['interval'])})"
    return text


def undefined_settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are ranked last: the score of a student of theirs on the examples that
    choose is undefined."""
    last = [row for row in rows if row["chooses"] and row["choosing"]["mean"] is None]
    return [", ".join(row["setting"]) or "the recipe's" for row in last]


def lacking(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings that have fewer seeds than others."""
    most = max((len(row["seeds"]) for row in rows), default=0)
    return [row for row in rows if len(row["seeds"]) < most]


def _notes(found: dict[str, Any], metric: MetricClass) -> list[str]:
    rows = found["settings"]
    notes = []
    others: dict[str, list[float]] = {}
    for row in rows:
        for name, numbers in row["models"].items():
            if numbers["role"] != "student" and numbers["mean"] is not None:
                others.setdefault(name, []).append(numbers["mean"])
    for name, means in others.items():
        ends = sorted({metric.shown_as(min(means)), metric.shown_as(max(means))})
        notes.append(f"{name}: {' to '.join(ends)}")
    majority = [row["majority"]["mean"] for row in rows if row["majority"]["mean"] is not None]
    if majority:
        notes.append(f"always {found['rule']}: {metric.shown_as(majority[0])}")
    if len(rows) > 1:
        if found["chosen"] is None:
            none = all(row["chooses"] for row in rows)
            these = "none with all seeds" if lacking(rows) else "none"
            why = f"{these} has a {metric.title} on the" if none else "some runs have no"
            notes.append(f"No setting is chosen: {why} examples that choose.")
        else:
            row = rows[found["chosen"]]
            notes.append(
                f"Chosen, on the examples that choose: {', '.join(row['setting'])}. Its score on "
                f"{found['split']}: {shown(row['score'], metric.shown_as)}."
                + (" It has learnt nothing, see below." if {*row["learnt"]} == {False} else "")
            )
        if short := lacking(rows):
            most = max(len(row["seeds"]) for row in rows)
            of = [f"{', '.join(row['setting'])} ({len(row['seeds'])} of {most})" for row in short]
            notes.append(f"Seeds are missing, and it is not chosen: {'; '.join(of)}.")
        if last := undefined_settings(rows):
            notes.append(f"Undefined, and ranked last: {'; '.join(last)}.")
    scores = [numbers["score"] for row in rows for _, numbers in students_of(row)]
    judged = scores + [row["choosing"] for row in rows if row["chooses"]]
    notes += undefined_note([score for numbers in judged for score in numbers["values"]])
    notes += learnt_notes([(", ".join(row["setting"]) or "The recipe's", row) for row in rows])
    return [*notes, *interval_notes(scores)]


def learnt_notes(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """A sentence where students are no better than the baseline.

    rows: settings, each by the name that it has in the sentence.
    """
    named = []
    for name, row in rows:
        if (nothing := row["learnt"].count(False)) == len(row["learnt"]):
            named.append(name)
        elif nothing:
            named.append(f"{name} ({nothing} of {len(row['learnt'])} seeds)")
    if not named:
        return []
    return [
        "Nothing was learnt, the student is no better than the baseline beyond chance: "
        f"{'; '.join(named)}."
    ]


def interval_notes(numbers: Sequence[dict[str, Any]]) -> list[str]:
    """What the intervals of these numbers are over; see `over_seeds`."""
    over = {tuple(each["over"]) for each in numbers}
    notes = []
    if over & {("seeds", "examples"), ("seeds",), ("examples",)}:
        notes.append(
            "In brackets: 95% intervals of the mean over seeds and test examples; *: beyond chance."
        )
    if ("seeds",) in over:
        notes.append(
            "Predictions of some runs are gone, or of other examples: intervals of these are over "
            "seeds alone, and too narrow: where the test is small, equal settings seem to differ "
            "in 15 to 47% of cases."
        )
    if any(len(each["values"]) == 1 for each in numbers):
        notes.append("With one seed nothing is known about chance in training: add seed=1,2,3.")
    return notes
