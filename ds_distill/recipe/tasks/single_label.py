"""The task of classifying texts that have one label each."""

from __future__ import annotations

from typing import Annotated, Literal

from ds_distill.recipe.entry import TaskEntry
from ds_distill.recipe.metrics import one_metric
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.tasks.base import COMPARED
from ds_distill.recipe.tasks.labelled import LabelledTask, classifier_usage


class SingleLabel(LabelledTask):
    """Classify texts, or pairs of texts; each has one label."""

    type: Literal["single-label"] = "single-label"
    metric: Annotated[MetricSettings, one_metric("classes"), COMPARED] = Accuracy.Settings()


ENTRY = TaskEntry(
    name="single-label",
    settings=SingleLabel,
    implementation="ds_distill.tasks.single_label:SingleLabelKind",
    over="classes",
    heads=("ForSequenceClassification",),
    noun="classifier",
    problem="single_label_classification",
    other_problems=("regression",),
    pipeline="text-classification",
    usage=classifier_usage,
)
