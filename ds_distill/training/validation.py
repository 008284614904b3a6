"""Validation of a student at the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.data.validation_split import CHOOSING_SPLIT, choosing_part
from ds_distill.engine.engine import Engine
from ds_distill.evaluation.scores import metric_values
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.tasks import metric_of
from ds_distill.run.run import Run
from ds_distill.tasks.kind import PredictInputs


@dataclass(frozen=True)
class Validation:
    """The choosing examples of a training, and how to score its student on them."""

    counts: dict[str, int]
    """How many they are; see `Examples.counts`."""
    metric: MetricClass
    """The task's, which chooses the epoch."""
    score: Callable[[Engine], dict[str, dict[str, float | None]]]
    """All metrics of each student of an engine, by its name there; see `metric_values`. Every rank
    must call it."""


def validation_of(run: Run, starts: Mapping[str, ModelReference]) -> Validation | None:
    """The examples by which a training chooses its epoch: those of the validation split that no
    expertise phase of the recipe fits on. None without such a split, and where it has no labels,
    which only `keep: last` can do without.

    starts: where the engine's students come from, by their names there.
    """
    if not run.data.has_split(CHOOSING_SPLIT):
        return None
    every = run.data.examples(CHOOSING_SPLIT)
    splits = run.recipe.fitted_splits(run.task_name)
    fitted = {split: run.data.examples(split).groups for split in splits}
    chosen = choosing_part(every.strata, every.groups, fitted, run.recipe.seed)
    examples = every.at(chosen)
    if run.task.reads_labels and not examples.labelled.any():
        return None
    tables = {
        name: run.data.tables(CHOOSING_SPLIT, [reference])[reference.name].at(chosen)
        for name, reference in starts.items()
    }
    collate = run.collator(examples, tables, [*starts.values()])
    words = run.kind.hidden_words(run.data, examples, tables, [*starts.values()])
    inputs = PredictInputs(collate, examples, [*starts], PADDED_BATCH, words=words)

    def score(engine: Engine) -> dict[str, dict[str, float | None]]:
        predictions = run.kind.predict(engine, inputs)
        # By one rank: all must choose the same epoch.
        return run.world.from_main(
            lambda: {
                name: metric_values(run.kind.scored(one, examples), run.kind.metrics)
                for name, one in predictions.items()
            }
        )

    return Validation(examples.counts, metric_of(run.task), score)
