"""The metrics, by what they are over."""

from __future__ import annotations

from ds_distill.parts.entry import MetricEntry, Over
from ds_distill.parts.tasks import TASKS, TaskSettings

_MODULE = "ds_distill.evaluation.metrics"

JUDGED = "accuracy"
"""The metric that models are chosen and compared by; over every kind there is one."""

METRICS: dict[Over, dict[str, MetricEntry]] = {
    "classes": {
        entry.name: entry
        for entry in (
            MetricEntry(
                name=JUDGED,
                over="classes",
                implementation=f"{_MODULE}:accuracy",
                title="accuracy",
                hub_name="accuracy",
            ),
            MetricEntry(
                name="macro_f1",
                over="classes",
                implementation=f"{_MODULE}:macro_f1",
                title="macro F1",
                hub_name="f1",
            ),
        )
    },
    "masked tokens": {
        entry.name: entry
        for entry in (
            MetricEntry(
                name=JUDGED,
                over="masked tokens",
                implementation=f"{_MODULE}:token_accuracy",
                title="accuracy",
                hub_name="accuracy",
            ),
            MetricEntry(
                name="loss",
                over="masked tokens",
                implementation=f"{_MODULE}:token_loss",
                title="loss",
                shown=None,
                higher_is_better=False,
            ),
            MetricEntry(
                name="perplexity",
                over="masked tokens",
                implementation=f"{_MODULE}:perplexity",
                title="perplexity",
                shown=".2f",
                higher_is_better=False,
                hub_name="perplexity",
            ),
        )
    },
}


def metrics_of(task: TaskSettings) -> dict[str, MetricEntry]:
    """The metrics of a task's predictions, by name."""
    return METRICS[TASKS[task.type].over]
