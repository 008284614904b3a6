"""What an evaluation reports of a model's predictions, and of two models'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import expit

from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    TokenScores,
    confusion_matrix,
)
from ds_distill.process.activity import marked
from ds_distill.recipe.entry import Over
from ds_distill.recipe.metrics import METRICS, reported_metrics
from ds_distill.recipe.metrics.classes import bin_of
from ds_distill.recipe.metrics.metric import Metric, MetricClass, MetricSettings

DENSE_CLASSES = 100
"""With more classes a report has the confusion matrix's counts that are not 0 alone."""

RELIABILITY_BINS = 15
"""Of the figure of reliability: as many as the calibration error has by default."""


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


def classification_report(
    predictions: ClassPredictions, names: Sequence[str], metrics: Mapping[str, Metric[Any]]
) -> dict[str, Any]:
    """Examples, metrics, accuracy per class, `confusion_counts`, reliability."""
    return {
        "examples": len(predictions),
        **metric_values(predictions, metrics),
        "per_class": predictions.per_class(names),
        "confusion": confusion_counts(predictions, len(names)),
        "reliability": reliability(
            predictions.confidence, predictions.predicted == predictions.labels
        ),
    }


def confusion_counts(
    predictions: ClassPredictions, classes: int
) -> list[list[int]] | dict[str, list[int]]:
    """The confusion matrix as JSON: rows of counts, true classes by predicted. With more than
    DENSE_CLASSES classes nearly all are 0, and it is the others alone: `true`, `predicted` (class
    ids) and `count`, one element for each."""
    labels, predicted = predictions.labels, predictions.predicted
    if classes <= DENSE_CLASSES:
        dense: list[list[int]] = confusion_matrix(labels, predicted, classes).tolist()
        return dense
    cells, counts = np.unique(labels * classes + predicted, return_counts=True)
    rows, columns = np.divmod(cells, classes)
    return {"true": rows.tolist(), "predicted": columns.tolist(), "count": counts.tolist()}


def label_report(
    predictions: LabelPredictions, names: Sequence[str], metrics: Mapping[str, Metric[Any]]
) -> dict[str, Any]:
    """Examples, metrics, F1 and `class_counts` of each label, reliability: of the probability of
    each label of each example, which is right where the label is there."""
    known = predictions.labels >= 0
    return {
        "examples": len(predictions),
        **metric_values(predictions, metrics),
        "per_class": predictions.per_class(names),
        "class_counts": predictions.class_counts(names),
        "reliability": reliability(
            expit(predictions.logits[known].astype(np.float64)), predictions.labels[known] == 1
        ),
    }


def reliability(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Of each bin of confidence that holds a prediction: the mean confidence, the accuracy, and how
    many predictions it holds.

    confidence: float64 [N], probabilities. right: bool [N].
    """
    bins = bin_of(confidence, RELIABILITY_BINS)
    return [
        {
            "confidence": float(confidence[here].mean()),
            "accuracy": float(right[here].mean()),
            "count": int(here.sum()),
        }
        for here in (bins == number for number in np.unique(bins))
    ]


def masked_lm_report(scores: TokenScores, metrics: Mapping[str, Metric[Any]]) -> dict[str, Any]:
    """Examples, masked tokens that all models know, metrics over these; hidden words; of a model
    that knows more tokens, `own_tokens`: the same over all that it knows. Raises UserError when no
    token is masked."""
    tokens = int(scores.tokens.sum())
    if tokens == 0:
        raise UserError(
            "a split has no token that is masked, so there is nothing to measure: its texts are "
            "too few or too short for task.masking.rate. Add texts to it, or raise the rate."
        )
    found: dict[str, Any] = {"examples": len(scores), "tokens": tokens}
    found |= metric_values(scores, metrics)
    if scores.words is not None:
        found["hidden_words"] = int(scores.words.sum())
    if (own := scores.of_own) is not None:
        found["own_tokens"] = {"tokens": int(own.tokens.sum()), **metric_values(own, metrics)}
    return found


def regression_report(
    predictions: NumberPredictions, metrics: Mapping[str, Metric[Any]]
) -> dict[str, Any]:
    """Examples, metrics."""
    return {"examples": len(predictions), **metric_values(predictions, metrics)}


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
    start = next((model for model, role in roles.items() if role == "start"), None)
    gaps = {
        teacher: difference(predictions[teacher], predictions[start], metric, groups)
        for teacher, role in roles.items()
        if role == "teacher" and start is not None
    }
    for student, role in roles.items():
        for other in roles if role == "student" else ():
            if other == student:
                continue
            row = {
                "student": student,
                "other": other,
                **difference(predictions[student], predictions[other], metric, groups),
            }
            if roles[other] == "teacher":
                row |= to_teacher(reports[student], reports[other], type(metric))
            if other in gaps and start is not None:
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
