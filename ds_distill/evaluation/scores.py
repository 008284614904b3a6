"""What an evaluation reports of a model's predictions, and of two models'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import ClassPredictions, Predictions, TokenScores
from ds_distill.process.activity import marked
from ds_distill.recipe.metrics import METRICS, reported_metrics
from ds_distill.recipe.metrics.metric import Metric, MetricClass, MetricSettings, Over


def build_metric(over: Over, settings: MetricSettings, labels: Sequence[str] = ()) -> Metric[Any]:
    """labels: the task's, in the order of the class ids; none over masked tokens or numbers."""
    return METRICS[over][settings.name](settings, labels)


def build_metrics(
    over: Over, labels: Sequence[str] = (), task_metric: MetricSettings | None = None
) -> dict[str, Metric[Any]]:
    """What an evaluation reports, by name; the task's metric first."""
    return {
        name: build_metric(over, settings, labels)
        for name, settings in reported_metrics(over, task_metric, labels).items()
    }


def metric_values(predictions: Any, metrics: Mapping[str, Metric[Any]]) -> dict[str, float | None]:
    """By metric, of those for which the model was asked; None where one is not defined for what the
    model predicts, as a correlation where that is always the same number. Raises UserError where
    one is not defined for these examples."""
    values: dict[str, float | None] = {}
    asked = {name: metric for name, metric in metrics.items() if not metric.lacks(predictions)}
    for name, metric in marked("computes metrics", asked.items()):
        values[name] = value = metric.value(predictions)
        if math.isnan(value) and metric.excludes(predictions):
            values[name] = None
        elif not math.isfinite(value):
            raise UserError(
                f"metric {name} has no value on these {len(predictions):,} examples ({value}): an "
                "AUC, for one, needs examples with its label and others, and a correlation labels "
                "that differ. Evaluate on other examples, or choose another metric."
            )
    return values


def model_report(
    predictions: Predictions, metrics: Mapping[str, Metric[Any]], names: Sequence[str] = ()
) -> dict[str, Any]:
    """What an evaluation says of a model: numbers of what was judged, metrics, and by class and
    confidence what there is. Of a masked-LM that knows more tokens than others `own_tokens`: the
    same over all that it knows.

    names: of the task's classes.

    Raises UserError where a metric is not defined for these examples.
    """
    found: dict[str, Any] = {**predictions.numbers(), **metric_values(predictions, metrics)}
    found |= predictions.details(names)
    if isinstance(predictions, TokenScores) and (own := predictions.of_own) is not None:
        found["own_tokens"] = {"tokens": int(own.tokens.sum()), **metric_values(own, metrics)}
    return found


# ------------------------------------------------------------------------------ two models


def difference(
    first: Any, second: Any, metric: Metric[Any], groups: np.ndarray | None = None
) -> dict[str, Any]:
    """Difference of a metric of two models' predictions, with its 95% interval; None both where the
    metric is not defined for what one of them predicts.

    groups: as of `paired_interval`.
    """
    if metric.excludes(first) or metric.excludes(second):
        return {"difference": None, "interval": None}
    return {
        "difference": metric.value(first) - metric.value(second),
        "interval": list(paired_interval(first, second, metric, groups=groups)),
    }


def comparisons(
    predictions: Mapping[str, Any],
    roles: Mapping[str, str],
    reports: Mapping[str, Mapping[str, Any]],
    metric: Metric[Any],
    groups: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Each student against each other model: the `difference`; against a teacher `to_teacher`, and
    `gap_closed` where the student before training, `start`, is among the models.

    predictions, roles (`teacher`, `student`, `control`, `start`) and reports: by model.
    metric: the task's.
    """
    rows = []
    start = next((model for model, role in roles.items() if role == "start"), "")
    gaps = {
        teacher: difference(predictions[teacher], predictions[start], metric, groups)
        for teacher, role in roles.items()
        if role == "teacher" and start
    }
    students = [model for model, role in roles.items() if role == "student"]
    for student, other in ((one, other) for one in students for other in roles if other != one):
        apart = difference(predictions[student], predictions[other], metric, groups)
        row = {"student": student, "other": other, **apart}
        if roles[other] == "teacher":
            row |= to_teacher(reports[student], reports[other], type(metric))
        if other in gaps:
            own, first = (reports[model][metric.name] for model in (student, start))
            defined = own is not None and first is not None
            row["gap_closed"] = (
                gap_closed(own - first, gaps[other], type(metric)) if defined else None
            )
        rows.append(row)
    return rows


def gap_closed(own: float, gap: Mapping[str, Any], metric: MetricClass) -> float | None:
    """The part of the way from the start to a teacher that a student has gone; None where the
    teacher is not better than the start beyond chance, so that there is no gap (the measure
    of the transfer sets' paper; docs/papers.md).

    own: the student's score less the start's. gap: the teacher's, with its interval.
    """
    return own / gap["difference"] if metric.better(gap["interval"]) else None


def retention(metric: MetricClass, score: float | None, whole: float | None) -> float | None:
    """A model's score as a share of another's, its teacher's; None where that is 0, one of them is
    not defined, or less is better."""
    if score is None or whole is None or whole <= 0 or not metric.higher_is_better:
        return None
    return score / whole


def to_teacher(
    student: Mapping[str, Any], teacher: Mapping[str, Any], metric: MetricClass
) -> dict[str, float | None]:
    """`retention`, and `median_class_difference`: the median over the classes with examples of the
    student's accuracy less the teacher's; None without classes."""
    own, others = (report.get("per_class", {}) for report in (student, teacher))
    differences = [own[name] - others[name] for name in own if own[name] is not None]
    return {
        "retention": retention(metric, student[metric.name], teacher[metric.name]),
        "median_class_difference": float(np.median(differences)) if differences else None,
    }


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, batches: Iterable[Mapping[str, torch.Tensor]]
) -> dict[str, Any]:
    """How well a classifier predicts labelled examples.

    model: of transformers, with a head for sequence classification. It runs in eval mode, on its
        own device and in its own dtype, and is in the mode in which it was afterwards.
    batches: what the model takes, as a DataLoader with transformers' DataCollatorWithPadding gives
        it: input_ids and so on, [B, S], and `labels`, int [B], negative where unknown (left out).

    Returns `examples`, `accuracy`, `macro_f1`, `ece` (expected calibration error), `per_class`
    (accuracy by the label's name in the model's configuration; None without examples), `confusion`
    (counts, true classes by predicted; of more than 100 classes see `confusion_counts`) and
    `reliability` (per bin of confidence: mean confidence, accuracy, count).

    Raises UserError when none of the examples has a label.
    """
    scores, truth = [], []
    was_training = model.training
    model.eval()
    for batch in batches:
        inputs = {name: values.to(model.device) for name, values in batch.items()}
        truth.append(inputs.pop("labels").cpu())
        scores.append(model(**inputs).logits.float().cpu())
    model.train(was_training)
    names = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
    predictions = ClassPredictions.labelled(torch.cat(scores).numpy(), torch.cat(truth).numpy())
    return model_report(predictions, build_metrics("classes", names), names)
