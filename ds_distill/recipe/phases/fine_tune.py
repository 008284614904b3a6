"""The fine-tune phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import PhaseEntry, TaskEntry
from ds_distill.recipe.phases.base import TrainingPhase, training_mistakes
from ds_distill.recipe.section import Count, Name, Section, Several, Share
from ds_distill.recipe.tasks import TASKS
from ds_distill.recipe.terms import CrossEntropyLoss, Losses, TermSettings, losses_of


class Focus(Section):
    """Makes an expert: all examples of some classes and a share of the others."""

    classes: list[str]
    """The classes of which it sees all examples."""
    share_of_others: Share = 0.0
    """Share of the examples of the other classes that it sees."""


def _on_labels() -> dict[str, TermSettings]:
    return {"cross_entropy": CrossEntropyLoss()}


class FineTune(TrainingPhase):
    """Train models without teachers."""

    kind: Literal["fine-tune"] = "fine-tune"
    models: Several[Name]
    """Teachers' names or `student`; one after the other with the same settings."""
    shared_head: bool = False
    """Train the teachers in `models` together, in one engine, each on its own text but all through
    one pooling layer and one prediction layer, so that their states come to mean the same (MT-BERT,
    Wu et al. 2021). The loss is the sum of theirs."""
    focus: Focus | None = None
    losses: Losses = Field(default_factory=_on_labels)
    """Default: cross_entropy, and mse where labels are numbers."""
    per_class: Count | None = None
    """Examples of each class to train on. Default: all."""
    save_as: Name | None = None
    """Name of the trained model. Default: the model's own name, which then means the
    trained one in later phases."""

    @model_validator(mode="after")
    def _one_name_one_model(self) -> FineTune:
        if self.save_as is not None and len(self.models) > 1:
            raise ValueError("`save_as` names one model, and `models` lists several")
        return self

    def of_task(self, task: TaskEntry) -> FineTune:
        if "losses" in self.model_fields_set:
            return self
        return self.model_copy(update={"losses": losses_of({task.label_term: {}})})

    @property
    def starts(self) -> list[str]:
        return list(self.models)

    @property
    def outputs(self) -> list[str]:
        return [self.save_as] if self.save_as else list(self.models)

    @property
    def trainings(self) -> list[list[str]]:
        return [self.outputs] if self.shared_head else super().trainings

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, True)]

    def lists(self) -> dict[str, list[str]]:
        focus = {"focus.classes": self.focus.classes} if self.focus is not None else {}
        return {"models": self.models, **focus}

    def labels_named(self) -> dict[str, list[str]]:
        focus = {"focus.classes": self.focus.classes} if self.focus is not None else {}
        return {**focus, **super().labels_named()}


def mistakes(settings: FineTune, context: Context) -> Iterator[str]:
    """Models that are not there, what needs classes where there are none, and what is wrong with
    any training."""
    yield from training_mistakes(settings, context)
    for model in settings.models:
        if model not in context.models:
            yield (
                f"{context.location}.models: no model {model!r} here. There are: "
                f"{', '.join(sorted(context.models))}."
            )
    yield from _taught_control(settings, context)
    if settings.shared_head:
        yield from _shared_head_mistakes(settings, context)
    task = context.task
    if task.predicts not in ("class", "labels"):
        has = "has a class for each word" if task.predicts == "tag" else "has no classes"
        for key in ("focus", "per_class"):
            if getattr(settings, key):
                yield (
                    f"{context.location}.{key}: chooses examples by class, and "
                    f"{task.location}.type={task.type} {has}. Take the key out."
                )
    elif settings.per_class is not None and task.predicts == "labels":
        limit = f"{task.location}.data.limit.{settings.split}={settings.per_class}"
        yield (
            f"{context.location}.per_class: caps the examples of each class, and with "
            f"{task.location}.type={task.type} an example has any number of them. Set {limit} "
            "instead, or take the key out."
        )


def _taught_control(settings: FineTune, context: Context) -> Iterator[str]:
    """A control that would go on from the student that it is to be compared with."""
    start = context.step.model("student")
    taught = start.distilled and start.head == context.task_name
    if taught and settings.models == ["student"] and settings.save_as is not None:
        assert start.made_by is not None
        by = f"phases.{context.recipe.phase_names()[start.made_by]}"
        yield (
            f"{context.location}.models: `student` is by now the one that {by} has trained, and "
            f"{settings.save_as!r} would go on from it. For a student without teachers put this "
            f"phase before {by}; to go on from it name it there with save_as, and here with models."
        )


def _shared_head_mistakes(settings: FineTune, context: Context) -> Iterator[str]:
    location, task = context.location, context.task
    others = [name for name in settings.models if name not in context.recipe.teachers]
    if len(settings.models) == 1:
        yield (
            f"{location}.shared_head=true: `models` names {settings.models[0]} alone, which shares "
            "its head with nobody. Name two teachers or more, or take shared_head out."
        )
    elif others and others[0] in context.models:
        yield (
            f"{location}.models: {others[0]!r} is none of the recipe's teachers, and with "
            "shared_head=true teachers are trained together. There are: "
            f"{', '.join(context.recipe.teachers) or 'none'}."
        )
    if TASKS[task.type].heads[0] != "ForSequenceClassification":
        yield (
            f"{location}.shared_head=true: shares the layers that classify a text, and "
            f"{task.location}.type={task.type} has no such layers. Take shared_head out."
        )


ENTRY = PhaseEntry(
    name="fine-tune",
    settings=FineTune,
    implementation="ds_distill.phases.fine_tune:fine_tune",
    mistakes=mistakes,
    makes="control",
)
