"""What can be wrong with teachers' labels, and what is worth a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig

from ds_distill.models.labels import are_generic, as_yaml, class_names
from ds_distill.recipe import Recipe


def label_mistakes(recipe: Recipe) -> Iterator[str]:
    """`teachers.NAME.labels` where they would have no effect."""
    given = [name for name, teacher in recipe.teachers.items() if teacher.labels is not None]
    tasks = recipe.tasks_by_name.values()
    if not any(task.has_classes for task in tasks):
        without = " and ".join(f"{task.location}.type={task.type}" for task in tasks)
        for name in given:
            yield f"teachers.{name}.labels: {without} has no labels. Take the key out."
        return
    for phase_name, phase in zip(recipe.phase_names(), recipe.phases, strict=True):
        for name in phase.starts:
            if name in given:
                yield (
                    f"teachers.{name}.labels: phase {phase_name!r} trains that model on the "
                    "task's own labels, and `labels` is for teachers that run as they are. "
                    "Take `labels` out, or name the checkpoint a second time, as another teacher."
                )


def label_notes(
    recipe: Recipe, labels: list[str], configs: Mapping[str, PreTrainedConfig]
) -> list[str]:
    """What to know of the labels of teachers that run as they are: one line each.

    configs: of these teachers, by name, in a recipe without mistakes.
    """
    notes = []
    for name, config in configs.items():
        names, teacher = class_names(config), recipe.teachers[name]
        if teacher.labels is None and are_generic(names):
            pairs = as_yaml(dict(zip(names, labels, strict=True)))
            notes.append(
                f"teachers.{name}: {teacher.model} does not name its classes, and they are taken "
                f"in the task's order: {pairs}. If that is not so, set teachers.{name}.labels."
            )
        elif len(names) > len(labels):
            notes.append(
                f"teachers.{name}.labels: {len(names) - len(labels)} of its {len(names)} classes "
                "are left out; its probabilities are over the others."
            )
    return notes
