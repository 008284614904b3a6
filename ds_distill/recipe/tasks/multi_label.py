"""The task of classifying texts that have any number of labels."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal

from ds_distill.recipe.entry import TaskEntry
from ds_distill.recipe.metrics import one_metric
from ds_distill.recipe.metrics.classes import MicroF1
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.tasks.base import COMPARED, Predicts
from ds_distill.recipe.tasks.labelled import LabelledTask, classifier_usage


class MultiLabel(LabelledTask):
    """Classify texts, or pairs of texts; each has any number of labels. A row's labels are a list,
    which may be empty. What a teacher knows is known for each label."""

    predicts: ClassVar[Predicts] = "labels"

    type: Literal["multi-label"] = "multi-label"
    metric: Annotated[MetricSettings, one_metric("labels"), COMPARED] = MicroF1.Settings()


ENTRY = TaskEntry(
    name="multi-label",
    settings=MultiLabel,
    implementation="ds_distill.tasks.multi_label:MultiLabelKind",
    over="labels",
    heads=("ForSequenceClassification",),
    noun="classifier",
    problem="multi_label_classification",
    other_problems=("single_label_classification", "regression"),
    pipeline="text-classification",
    usage=partial(classifier_usage, all_scores=True),
)
