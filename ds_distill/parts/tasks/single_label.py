"""The task of classifying texts that have one label each."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import field_validator

from ds_distill.parts.entry import TaskEntry
from ds_distill.parts.metrics import Accuracy, MetricSettings, one_metric
from ds_distill.parts.tasks.base import TaskSettings


class SingleLabel(TaskSettings):
    """Classify texts, or pairs of texts; each has one label."""

    has_classes: ClassVar[bool] = True

    type: Literal["single-label"] = "single-label"
    labels: list[str] | None = None
    """Label names in the order of the class ids. Default: what the data declare
    (labels.json in the folder, the hub's features), else the sorted names in train."""
    metric: Annotated[MetricSettings, one_metric("classes")] = Accuracy()
    """What models are compared and chosen by: a metric's name, or its settings. Evaluations report
    others too."""

    @property
    def given_labels(self) -> list[str] | None:
        return self.labels

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: list[str] | None) -> list[str] | None:
        if labels is not None:
            if len(labels) < 2:
                raise ValueError("needs at least two labels")
            repeated = {label for label in labels if labels.count(label) > 1}
            if repeated:
                raise ValueError(f"label {sorted(repeated)[0]!r} stands twice")
        return labels


def _usage(task: SingleLabel) -> list[str]:
    text = '"a text of any length " * 1000'
    if task.data.columns.text_b is not None:
        text = f'{{"text": {text}, "text_pair": "the second text"}}'
    return [
        'classify = pipeline("text-classification", model=".")',
        f"classify({text}, truncation=True, max_length={task.max_length})",
    ]


ENTRY = TaskEntry(
    name="single-label",
    settings=SingleLabel,
    implementation="ds_distill.tasks.single_label:SingleLabelKind",
    over="classes",
    heads=("ForSequenceClassification",),
    noun="classifier",
    pipeline="text-classification",
    usage=_usage,
)
