"""Train teachers, or a student without teachers: on labels, or as masked-LMs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds_distill.data.batches import Examples
from ds_distill.data.examples import keep_per_class
from ds_distill.data.plan import keep_share_of_others
from ds_distill.models.bundle import Bundle
from ds_distill.parts.phases import FineTune
from ds_distill.run.context import Run
from ds_distill.run.job import Job, terms_of, trainable_model
from ds_distill.run.training import train_each
from ds_distill.run.validation import validation_of


def fine_tune(phase: FineTune, number: int, name: str, run: Run) -> dict[str, Any]:
    """Fine-tune each of the phase's models."""
    models = dict(zip(phase.outputs, phase.models, strict=True))
    return train_each(
        number,
        phase.outputs,
        lambda output: job_of(phase, number, models[output], output, run),
        run,
    )


def job_of(phase: FineTune, number: int, model_name: str, output: str, run: Run) -> Job:
    """All that one model's training needs."""
    reference = run.reference(model_name, number)
    model = trainable_model(run, reference, phase)
    examples = run.examples(phase.split)
    chosen = np.arange(len(examples))
    if run.task.has_labels:
        chosen = chosen_examples(phase, examples, run.labels)
    tables = {"student": run.tables(phase.split, [reference])[reference.name].at(chosen)}
    examples = examples.at(chosen)
    terms = terms_of(phase, run, model, examples)
    return Job(
        number=number,
        output=output,
        settings=phase,
        bundle=Bundle(model, {}, terms),
        start=reference,
        examples=examples,
        collate=run.kind.collator_of_labels(examples, tables) or run.collator(examples, tables),
        validation=validation_of(run, reference),
    )


def chosen_examples(phase: FineTune, examples: Examples, labels: list[str]) -> np.ndarray:
    """Indices of the examples that a phase trains on: labelled, in focus, capped per class."""
    chosen = np.flatnonzero(examples.labelled)
    if phase.focus is not None:
        part = examples.at(chosen)
        classes = [labels.index(label) for label in phase.focus.classes]
        share = phase.focus.share_of_others
        chosen = chosen[keep_share_of_others(part.labels, part.keys, classes, share)]
    if phase.per_class is not None:
        part = examples.at(chosen)
        capped = keep_per_class(part.labels, part.keys.numpy(), phase.per_class)
        chosen = chosen[capped]
    return chosen
