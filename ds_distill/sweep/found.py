"""What the runs of a sweep found, setting by setting, and of several recipes the means of each
model: JSON objects, which results.json holds and `tables` shows."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ds_distill.evaluation.bootstrap import mean_interval, resampled, variance_of_examples
from ds_distill.reporting.results import evaluation_of_student, task_metric_of, trained_models
from ds_distill.sweep.runs import MODEL, SweepRun, Variant
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
    there, because a score is undefined, is ranked last: it is chosen by no means. One alone needs
    none.

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
        "chosen": 0
        if len(rows) == 1
        else (task_metric_of(one).best(choosing) if complete else None),
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


# ------------------------------------------------------------------- models, and several recipes


def results(
    runs: Sequence[SweepRun], ended: Mapping[Variant, Found], draws: Draws = no_draws
) -> Found:
    """Of one recipe the `summary` of its runs; of several `recipes`, what is known of each, and
    `means`, those of each model over them.

    ended: the `run_result` of each run that has ended.
    draws: of the runs; asked for only where they are compared.
    """
    groups = {run.variant.recipe: run.group for run in runs}
    if len(groups) == 1:
        return summary(ended, draws)
    models = [*dict.fromkeys(run.variant.model for run in runs)]
    recipes = {
        recipe: _of_models({v: of for v, of in ended.items() if v.recipe == recipe}, models, draws)
        for recipe in groups
    }
    kinds = {kind: _means(recipes, models, of) for kind, of in _weights(groups).items()}
    means = [{"model": model} | {k: of[model] for k, of in kinds.items()} for model in models]
    return {"recipes": recipes, "means": means}


def _of_models(ended: Mapping[Variant, Found], models: Sequence[str | None], draws: Draws) -> Found:
    """The `summary` of a recipe's runs under the setting that is chosen for each model; `grids` has
    those of all settings of each."""
    grids = {
        str(model): summary({run: of for run, of in ended.items() if run.model == model})
        for model in models
    }
    rows = [of["settings"][of["chosen"]] for of in grids.values() if of["chosen"] is not None]
    chosen = [row["setting"] for row in rows]
    compared = summary({run: of for run, of in ended.items() if [*run.setting] in chosen}, draws)
    return {**compared, "chosen": None, "grids": grids}


def of_model(recipe: Found, model: str | None) -> Found | None:
    """A model's row of one of several recipes; None where no setting of it could be chosen."""
    rows = recipe["settings"]
    return next((r for r in rows if not model or f"{MODEL}={model}" in r["setting"]), None)


def _weights(groups: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """What each recipe counts in the `mean` and, where some are in groups, in the `macro mean`:
    that over the groups of the mean of each, as BLURB's score."""
    sizes = Counter(groups.values())
    found = {"mean": dict.fromkeys(groups, 1 / len(groups))}
    if 1 < len(sizes) < len(groups):
        each = {recipe: 1 / (len(sizes) * sizes[group]) for recipe, group in groups.items()}
        found["macro mean"] = each
    return found


def _means(
    recipes: Found, models: Sequence[str | None], weights: Mapping[str, float]
) -> dict[str | None, Found]:
    """By model the weighted mean over the recipes, seed by seed, what part of the first model's it
    is, and what it is less that; None where a recipe has no score of the model, or not one for each
    seed, one that is undefined, or one that is no share, or of which less is better. The recipes'
    test examples are drawn apart, so their variances add up."""

    def over_recipes(model: str | None, key: str) -> Found | None:
        found, variances = [], []
        for name, of in recipes.items():
            numbers = (of_model(of, model) or {}).get(key)
            if numbers is None or None in numbers["values"]:
                return None
            metric, examples = task_metric_of(of), numbers["variance_of_examples"]
            if not (metric.is_share() and metric.higher_is_better):
                return None
            found.append([weights[name] * value for value in numbers["values"]])
            variances.append(math.nan if examples is None else weights[name] ** 2 * examples)
        if len({*map(len, found)}) > 1:
            return None
        variance, by_seed = sum(variances), map(math.fsum, zip(*found, strict=True))
        return over_seeds([*by_seed], None if math.isnan(variance) else variance)

    means = {model: over_recipes(model, "score") for model in models}
    whole = means[models[0]]
    known = whole is not None and whole["mean"] > 0
    return {
        model: {
            "score": mean,
            "retention": mean["mean"] / whole["mean"] if mean and whole and known else None,
            "to_first": over_recipes(model, "to_first") if whole else None,
        }
        for model, mean in means.items()
    }
