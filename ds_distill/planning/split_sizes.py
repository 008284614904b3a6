"""How many examples a split has, and how long they are, where that can be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_distill.data.batches import Units
from ds_distill.data.open_source import open_source
from ds_distill.data.schedule import chosen_examples
from ds_distill.data.tokenizer import example_lengths, load_tokenizer
from ds_distill.errors import UserError, did_you_mean, first_line
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import FineTune
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tasks import TaskSettings

_SAMPLE = 500


@dataclass(frozen=True)
class SplitFacts:
    """What is known of a split."""

    split: str
    examples: int | None
    """None where the data could not be read."""
    tokens: float
    """Of the student, mean of the examples; the task's maximum where it is not known."""
    why_not: str | None = None
    """Why the examples could not be counted."""


def label_names(recipe: Recipe, task: TaskSettings) -> list[str]:
    """The labels of a task: the recipe's, or those of its data; none where it has no classes.
    Raises UserError where they cannot be read."""
    given = task.given_labels
    return open_source(task, data_folder=recipe.data_folder).labels if given is None else given


def count_chosen(recipe: Recipe, name: str, phase: FineTune, labels: list[str]) -> int:
    """How many examples a phase trains on that chooses among those of its split. Raises UserError
    where these cannot be read, and for a class that is none of the task's."""
    for label in phase.focus.classes if phase.focus is not None else ():
        if label not in labels:
            raise UserError(
                f"phases.{name}.focus.classes: {label!r} is no label of the task, which has "
                f"{', '.join(labels)}.{did_you_mean(label, labels)} Name classes that it has, or "
                "take focus out."
            )
    source = open_source(recipe.task_of(phase), data_folder=recipe.data_folder)
    return len(chosen_examples(phase, Units.of(source.read(phase.split)), labels))


def split_facts(recipe: Recipe, task: TaskSettings, split: str) -> SplitFacts:
    """Of a split of a task, by its first examples' tokens."""
    try:
        data = open_source(task, data_folder=recipe.data_folder).read(split)
        reference = resolve_model(recipe.student.model, recipe.models_folder)
        tokenizer = load_tokenizer(reference, recipe.student.revision, of_words=task.of_words)
    except UserError as error:
        return SplitFacts(split, None, task.max_length, first_line(error))
    sample = data.select(np.linspace(0, len(data) - 1, min(_SAMPLE, len(data))).astype(int))
    lengths = example_lengths(sample, tokenizer)
    if not task.cuts:
        more = np.maximum(lengths - task.max_length, 0) / (task.max_length - task.overlap)
        windows = 1 + np.ceil(more)
        tokens = float((lengths + (windows - 1) * task.overlap).sum() / windows.sum())
        return SplitFacts(split, round(len(data) * float(windows.mean())), tokens)
    return SplitFacts(split, len(data), float(np.minimum(lengths, task.max_length).mean()))
