"""Train teachers, or a student without teachers: on labels, or as masked-LMs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_distill.data.schedule import chosen_examples
from ds_distill.models.shared_head import bundle_of
from ds_distill.recipe.phases import FineTune
from ds_distill.records import Trained
from ds_distill.run.run import Run
from ds_distill.training.loop import train_each
from ds_distill.training.setup import Job, terms_of, trainable_model, validation_of


def fine_tune(phase: FineTune, number: int, name: str, run: Run) -> Trained:
    """Fine-tune each of the phase's models."""
    if phase.shared_head:
        run.log.info(
            f"  {', '.join(phase.models)} are trained together, through one head that is drawn "
            f"from seed {run.recipe.seed}"
        )
    return train_each(
        number, phase.trainings, lambda outputs: job_of(phase, number, outputs, run), run
    )


def job_of(phase: FineTune, number: int, outputs: Sequence[str], run: Run) -> Job:
    """All that a training of one model needs, or of several with one head."""
    names = list(outputs) if phase.shared_head else ["student"]
    starts = {
        name: run.reference(phase.start_of(output), number)
        for name, output in zip(names, outputs, strict=True)
    }
    models = {name: trainable_model(run, start, phase) for name, start in starts.items()}
    examples = run.data.examples(phase.split)
    chosen = np.arange(len(examples))
    if run.task.reads_labels:
        chosen = chosen_examples(phase, examples, run.labels)
    tables = {
        name: run.data.tables(phase.split, [start])[start.name].at(chosen)
        for name, start in starts.items()
    }
    examples = examples.at(chosen)
    terms = {name: terms_of(phase, run, model, examples) for name, model in models.items()}
    return Job(
        number=number,
        outputs=dict(zip(names, outputs, strict=True)),
        settings=phase,
        bundle=bundle_of(models, terms, run.recipe.seed),
        starts=starts,
        examples=examples,
        collate=run.collator(examples, tables, [*starts.values()], labels_alone=True),
        validation=validation_of(run, starts),
    )
