"""The metrics, by what they are over: one class each, one file per family.

`metric` says what a metric is. Each reads of predictions what a protocol in its family's file says;
`ds_distill.evaluation` has their types. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

# In the order of reports: of the metrics of words accuracy is the last.
from ds_distill.recipe.metrics import words  # isort: skip
from ds_distill.recipe.metrics import answers, characters, classes, numbers, tokens  # isort: skip
from ds_distill.recipe.metrics.metric import METRICS, MetricSettings, Over
from ds_distill.recipe.part import OneOf

__all__ = [
    "METRICS",
    "answers",
    "characters",
    "classes",
    "numbers",
    "one_metric",
    "reported_metrics",
    "tokens",
    "words",
]


def one_metric(over: Over) -> OneOf:
    """Annotates a field that holds the settings of one metric over that."""
    return OneOf("metric", "name", METRICS[over])


def reported_metrics(
    over: Over, task_metric: MetricSettings | None = None, labels: Sequence[str] | None = None
) -> dict[str, MetricSettings]:
    """Settings of the metrics that an evaluation reports, by name: the task's first, then those
    that every evaluation reports.

    task_metric: the task's metric, by which its models are compared and chosen.
    labels: the task's. Metrics that cannot be of them are left out, as those of entities where tags
        are none of entities. None: any.
    """
    found = {} if task_metric is None else {task_metric.name: task_metric}
    for name, metric in METRICS[over].items():
        if over in metric.reported and name not in found:
            settings = metric.Settings()
            if labels is None or not any(metric(settings, labels).label_mistakes()):
                found[name] = settings
    return found
