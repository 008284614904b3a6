"""Whether the metrics of a task have a value on its labels, and on the splits that choose or
judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import datasets
import numpy as np

from ds_distill.data.columns import as_numpy
from ds_distill.data.sources import has_labels
from ds_distill.data.validation_split import CHOOSING_SPLIT
from ds_distill.errors import Mistake
from ds_distill.recipe import Recipe
from ds_distill.recipe.metrics import METRICS, reported_metrics
from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.tasks import TASKS, TaskSettings, metric_of
from ds_distill.recipe.training import Training


def metric_mistakes(
    recipe: Recipe,
    task_name: str,
    labels: list[str],
    splits: Mapping[str, datasets.Dataset],
    class_counts: Mapping[str, np.ndarray],
) -> Iterator[Mistake]:
    """A metric that names labels which the task has not, or has no label to be about; and one
    without a value on a split that chooses or judges, which a run would find after its trainings.

    splits: those that are read. class_counts: of those that are labelled with classes.
    """
    task = recipe.tasks_by_name[task_name]
    mistakes = list(metric_of(task)(task.metric, labels).label_mistakes())
    at = f"{task.location}.metric"
    yield from (Mistake(f"{at}.{key}" if key else at, what) for key, what in mistakes)
    if mistakes:
        return
    for split, phase in _judging(recipe, task_name).items():
        if task.predicts == "number" and split in splits and has_labels(splits[split]):
            counts = np.unique(as_numpy(splits[split], "label"), return_counts=True)[1]
        elif split in class_counts:
            counts = class_counts[split]
        else:
            continue
        where, remedy = f"split {split!r}", "it, or take another split"
        yield from no_value(task, labels, splits[split], counts, phase, where, remedy)


def no_value(
    task: TaskSettings,
    labels: list[str],
    data: datasets.Dataset,
    counts: np.ndarray,
    phase: str,
    where: str,
    remedy: str,
) -> Iterator[Mistake]:
    """The first metric that a phase reports which has no value on some examples.

    data: the examples. counts: how many of them, or of their words, have each label. where: which
        they are. remedy: what to add some to.
    """
    over = TASKS[task.type].over
    examples = int(counts.sum()) if "words" in data.column_names else len(data)
    for name, settings in reported_metrics(over, task.metric, labels).items():
        metric = METRICS[over][name](settings, labels)
        if (why := metric.no_value(counts, examples)) is None:
            continue
        other = f", or another metric with {task.location}.metric=NAME"
        yield Mistake(
            f"phases.{phase}",
            f"metric {metric.name} has no value on {where}: {why}. Add examples "
            f"to {remedy}{'' if over in metric.reported else other}.",
        )
        return  # of others the reason is the same


def _judging(recipe: Recipe, task_name: str) -> dict[str, str]:
    """The splits on which a task's metrics are computed, and the first phase that does."""
    found: dict[str, str] = {}
    for name, phase in recipe.named_phases(task_name):
        splits = [CHOOSING_SPLIT] if isinstance(phase, Training) else []
        if PHASES[phase.kind].makes in ("evaluation", "expertise"):
            splits = [split for split, _ in phase.reads]
        for split in splits:
            found.setdefault(split, name)
    return found
