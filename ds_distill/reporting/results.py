"""What is asked of a run's results.json, and of an evaluation's record in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import shippable, trained_on
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.metric import MetricClass, Over, no_width
from ds_distill.recipe.phases import PHASES, Makes
from ds_distill.records import EvaluationRecord, TrainedModel

PER_CLASS: dict[Over, str] = {"classes": "accuracy", "labels": "F1", "words": "F1"}
"""What `per_class` of an evaluation is, by what its metrics are over; masked tokens, answers,
characters of spans and numbers have none."""

NOUNS: dict[Over, str] = {"classes": "class", "labels": "label", "words": "type"}
"""What `per_class` has a value for; of words the type of their entities, or else their tag."""


def records_of(results: Mapping[str, Any], makes: Makes) -> list[Any]:
    """The records of the phases that leave such a thing, in order; see `PhaseSettings.makes`."""
    return [record for record in results["phases"] if PHASES[record["kind"]].makes == makes]


def trained_models(results: Mapping[str, Any]) -> list[TrainedModel]:
    """Of each training, in order, what its record says of each model."""
    return [model for record in results["phases"] for model in record.get("trained", [])]


def evaluations_of_student(results: Mapping[str, Any]) -> list[EvaluationRecord]:
    """The records of the evaluations of the shipped student as it is: those since its last
    training, in order."""
    found: list[EvaluationRecord] = []
    for record in results["phases"]:
        if any(model["output"] == results["student"] for model in record.get("trained", [])):
            found = []
        elif PHASES[record["kind"]].makes == "evaluation":
            found += [record] if results["student"] in record["models"] else []
    return found


def evaluation_of_student(results: Mapping[str, Any]) -> EvaluationRecord | None:
    """The last of these that is of its own task, on which it was trained and chosen; of another
    where there is none."""
    found = evaluations_of_student(results)
    own = [record for record in found if record["task"] == results.get("task")]
    return next(reversed(own or found), None)


def last_evaluations(results: Mapping[str, Any]) -> list[EvaluationRecord]:
    """The record of the last evaluate phase of the shipped student's task; where there is none, of
    each other task, on which it may stand beside models of theirs."""
    last = {record["task"]: record for record in records_of(results, "evaluation")}
    own = last.get(results["task"])
    return list(last.values()) if own is None else [own]


def left_out(results: Mapping[str, Any]) -> dict[str, str]:
    """The teachers that expertise phases of the shipped student's task have left out, and why."""
    records = records_of(results, "expertise")
    of_task = [record for record in records if record["task"] == results["task"]]
    return {teacher: why for record in of_task for teacher, why in record["left_out"].items()}


def metrics_of(evaluation: EvaluationRecord) -> dict[str, MetricClass]:
    """The metrics that an evaluation's record holds, by name: the task's first."""
    over, metrics = evaluation["over"], METRICS[evaluation["over"]]
    reported = (name for name, metric in metrics.items() if over in metric.reported)
    names = dict.fromkeys([evaluation["metric"], *reported])
    held = next(iter(evaluation["models"].values()))
    return {name: metrics[name] for name in names if name in held}


def task_metric_of(evaluation: Mapping[str, Any]) -> MetricClass:
    """The metric that models were compared by: of an evaluation's record, or of what
    else has its `over` and `metric`."""
    return METRICS[evaluation["over"]][evaluation["metric"]]


def limits_of(model: Mapping[str, Any]) -> str:
    """What a model's score is not of, as the end of a name: ` (on 1,200 examples; knows 4 of 7
    labels)`; empty for one that was asked of all examples and knows all labels.

    model: of an evaluation's record.
    """
    limits = [f"on {model['examples']:,} examples"] if "not_given" in model else []
    if "knows" in model:
        limits.append(f"knows {len(model['knows']['labels'])} of {model['knows']['of']} labels")
    return f" ({'; '.join(limits)})" if limits else ""


def answer_of(evaluation: Mapping[str, Any]) -> str:
    """What the baseline of an evaluation's record predicts: a class in quotes, a number without."""
    answer: str = evaluation["baseline"]["answer"]
    return answer if evaluation["over"] == "numbers" else repr(answer)


def undefined_note(scores: Iterable[float | None]) -> list[str]:
    """One sentence where a score is undefined."""
    if None not in scores:
        return []
    return [
        "Undefined: not defined for what the model predicts, as a correlation where that is always "
        "the same number."
    ]


def settings_note(evaluation: Mapping[str, Any]) -> str:
    """`Micro F1: leave out DDI-false.`; empty where the task's metric is as it is by default."""
    settings = evaluation["metric_settings"]
    if not settings:
        return ""
    shown = (
        f"{key.replace('_', ' ')} {', '.join(value) if isinstance(value, list) else value}"
        for key, value in settings.items()
    )
    return f"{task_metric_of(evaluation).heading()}: {'; '.join(shown)}."


def interval_as(form: Callable[[float], str], interval: Sequence[float]) -> str:
    """`LOW to HIGH`; of no width, see `no_width`, that it is not known."""
    low, high = interval
    if no_width(interval):
        return "not known: every resample gives the same"
    return f"{form(low)} to {form(high)}"


_ORDER = ("train", "fit", "choose", "judge")
_USED_UP = ("fit", "choose")


def uses(recipe: Recipe, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per use, in the order train, fit, choose, judge.

    Each has `use`, `task`, `split`, `examples`, `of` (what was trained, fitted, chosen or judged),
    and `warnings` (why figures on these examples are too optimistic).

    records: the records of the phases, in order; of a run that stopped, those that are done.
    """
    found: dict[tuple[str, str, str, int], dict[str, None]] = {}
    for about, of in _each(recipe, records):
        found.setdefault(about, {})[of] = None
    table = []
    ordered = sorted(found.items(), key=lambda item: _ORDER.index(item[0][0]))
    for (use, task, split, examples), every in ordered:
        warnings = []
        if use != "train" and (seen := trained_on(recipe, task, split)):
            were = "was" if len(seen) == 1 else "were"
            warnings.append(f"{', '.join(seen)} {were} trained on this split")
        others = {one[0] for one in found if one[1:3] == (task, split) and one[0] in _USED_UP}
        if use == "judge" and others:
            warnings.append(f"the same split was used to {' and to '.join(sorted(others))}")
        where = {"use": use, "task": task, "split": split, "examples": examples}
        table.append({**where, "of": list(every), "warnings": warnings})
    return table


def _each(
    recipe: Recipe, records: list[dict[str, Any]]
) -> Iterator[tuple[tuple[str, str, str, int], str]]:
    """((use, task, split, examples), what for)."""
    candidates, shipped = [name for _, name in shippable(recipe, CHOOSING_SPLIT)], []
    for phase, record in zip(recipe.phases, records, strict=False):
        task = recipe.task_name(phase)
        for model in record.get("trained", []):
            yield ("train", task, model["split"], model["examples"]), model["output"]
            if (chosen := model["choosing"]) is not None:
                where = "choose", task, chosen["split"], chosen["examples"]
                if chosen["keep"] == "best":
                    yield where, f"epoch of {model['output']}"
                if len(candidates) > 1 and model["output"] in candidates:
                    shipped.append((where, "student to ship"))
        if phase.makes == "expertise":
            where = "fit", task, record["split"], record["examples"]
            yield where, "routing, and which policy it follows"
        elif phase.makes == "evaluation":
            for name, model in record["models"].items():
                yield ("judge", task, record["split"], model["examples"]), name
    yield from shipped
