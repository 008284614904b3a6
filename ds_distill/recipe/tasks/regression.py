"""The task of predicting a number of a text."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ds_distill.recipe.entry import TaskEntry
from ds_distill.recipe.metrics import one_metric
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.metrics.numbers import Pearson
from ds_distill.recipe.tasks.base import COMPARED, Predicts, Rows, TaskSettings
from ds_distill.recipe.tasks.labelled import example_text


class Regression(TaskSettings):
    """Predict a number of each text, or pair of texts, such as how alike two are. A row's label is
    a finite number; models have one output, which is the number itself."""

    rows: ClassVar[Rows] = "text"
    predicts: ClassVar[Predicts] = "number"

    type: Literal["regression"] = "regression"
    metric: Annotated[MetricSettings, one_metric("numbers"), COMPARED] = Pearson.Settings()


def _usage(task: Regression, pairs: bool) -> list[str]:
    """On a text of any length. The pipeline calls the number a score."""
    return [
        'predict = pipeline("text-classification", model=".")',
        f"predict({example_text(pairs)}, truncation=True, max_length={task.max_length})",
    ]


ENTRY = TaskEntry(
    name="regression",
    settings=Regression,
    implementation="ds_distill.tasks.regression:RegressionKind",
    over="numbers",
    heads=("ForSequenceClassification",),
    noun="regression model",
    outputs=1,
    problem="regression",
    label_term="mse",
    pipeline="text-classification",
    usage=_usage,
)
