"""A training before it begins: the model, its loss terms, and the engine for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ds_distill.data.batches import Collator, Examples
from ds_distill.engine.config import batch_shape, micro_batches_together, zero_stage
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import load_config
from ds_distill.models.load import freeze_embeddings, set_dropout
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.phases import TrainingPhase, training_name
from ds_distill.run.run import Run
from ds_distill.training.validation import Validation


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
    examples: Examples
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
    examples: Examples,
    teachers: Iterable[ModelReference] = (),
) -> dict[str, Term]:
    """A phase's loss terms.

    model: the one that it trains. examples: those that it trains on.
    """
    configs = {
        reference.name: load_config(reference.model, reference.revision) for reference in teachers
    }
    widths = {name: config.hidden_size for name, config in configs.items()}
    depths = {name: config.num_hidden_layers for name, config in configs.items()}
    counts = examples.class_counts(len(run.labels)).tolist() if run.labels else []
    torch.manual_seed(run.recipe.seed)  # projections start the same on every rank
    return build_terms(
        settings.losses,
        TermInputs(
            model.config.hidden_size,
            widths,
            model.config.num_hidden_layers,
            depths,
            run.labels,
            counts,
            run.recipe.seed,
        ),
    )


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
    ahead = signals > 0 and (stage == 3 or job.collate.packs_all(bundle.teachers))
    return micro_batches_together(
        stage, examples, micro_steps, task.max_length, signals if ahead else None
    )
