"""A training before it begins: the model, its loss terms, the engine for them, its validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ds_distill.data.batches import Collator, Units
from ds_distill.data.groups import CHOOSING_SPLIT, choosing_part
from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.engine.config import batch_shape, micro_batches_together, zero_stage
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.evaluation.scores import metric_values
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import load_config
from ds_distill.models.load import freeze_embeddings, set_dropout
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.phases import TrainingPhase, training_name
from ds_distill.recipe.tasks import metric_of
from ds_distill.run.run import Run
from ds_distill.tasks.kind import PredictInputs


@dataclass(frozen=True)
class Validation:
    """The choosing examples of a training, and how to score its student on them."""

    counts: dict[str, int]
    """How many they are; see `Units.counts`."""
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


@dataclass(frozen=True)
class Job:
    """One training: of one model, or of several in one engine."""

    number: int
    outputs: Mapping[str, str]
    """What the bundle's students will be called, by their names there."""
    settings: TrainingPhase
    bundle: Bundle
    starts: Mapping[str, ModelReference]
    """Where each student comes from, by its name in the bundle: its tokenizer goes with the
    trained model."""
    examples: Units
    collate: Collator
    validation: Validation | None
    """None where the data have no validation split."""

    @property
    def name(self) -> str:
        """As events, checkpoints and messages call it."""
        return training_name(self.outputs.values())

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from the run's other trainings."""
        return self.number, self.name


def trainable_model(
    run: Run, reference: ModelReference, settings: TrainingPhase
) -> PreTrainedModel:
    """The model that a phase trains, with the task's head."""
    model = run.model(reference, new_head=True)
    if settings.freeze_embeddings:
        freeze_embeddings(model)
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    return model


def terms_of(
    settings: TrainingPhase,
    run: Run,
    model: PreTrainedModel,
    examples: Units,
    teachers: Iterable[ModelReference] = (),
) -> dict[str, Term]:
    """A phase's loss terms.

    model: the one that it trains. examples: those that it trains on.
    """
    configs = {
        reference.name: load_config(reference.model, reference.revision) for reference in teachers
    }
    counts = examples.class_counts(len(run.labels)).tolist() if run.labels else []
    torch.manual_seed(run.recipe.seed)  # projections start the same on every rank
    inputs = TermInputs.of(model.config, configs, run.labels, counts, run.recipe.seed)
    return build_terms(settings.losses, inputs)


def start_engine(job: Job, run: Run, total_steps: int) -> Engine:
    """A job's engine at its first step."""
    settings, config = job.settings, run.deepspeed(job.settings)
    torch.manual_seed(run.recipe.seed + run.world.rank)  # dropout differs between ranks
    return Engine(
        job.bundle,
        config,
        run.world,
        OptimizerSettings(
            settings.learning_rate,
            settings.weight_decay,
            total_steps,
            round(settings.warmup * total_steps),
            beta2=settings.adam_beta2,
            epsilon=settings.adam_epsilon,
            schedule=settings.schedule,
        ),
        student_resident=run.recipe.student_resident,
        together=_read_together(job, run, zero_stage(config)),
    )


def _read_together(job: Job, run: Run, stage: int) -> int:
    """Over how many micro-batches live teachers run at once: the same on every rank."""
    task, bundle = run.recipe.task_of(job.settings), job.bundle
    examples, micro_steps = batch_shape(job.settings, run.world.size)
    tokens = examples * task.max_length
    share = 1.0 if bundle.every_token else task.row_share
    signals = bundle.signal_bytes(examples if share is None else round(share * tokens), tokens)
    packs = job.collate.packs_all(bundle.teachers)
    return micro_batches_together(stage, examples, micro_steps, task.max_length, signals, packs)
