"""What is known of a recipe before it runs: its models, its labels, how many examples its splits
have and how long they are, where that can be read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ds_distill.check.data import label_mistakes
from ds_distill.data.batches import Units
from ds_distill.data.open_source import open_source
from ds_distill.data.schedule import chosen_examples
from ds_distill.data.tokenizer import example_lengths, load_tokenizer
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.precision import model_dtype, resolved_name
from ds_distill.errors import UserError, first_line, refuse
from ds_distill.models.student import student_of
from ds_distill.planning.gpus import Device
from ds_distill.planning.memory import Zero
from ds_distill.planning.models import PlannedModel, known_config
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.phases import Cache, Distil, FineTune, TrainingPhase
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


class Facts:
    """A recipe, the device and the ranks that it is planned for, and what is read of it, once."""

    def __init__(self, recipe: Recipe, device: Device, ranks: int) -> None:
        self.recipe, self.device, self.ranks = recipe, device, ranks
        self.notes: list[str] = []
        """What is assumed, and why."""
        self.models: dict[tuple[str, str, int | None], PlannedModel] = {}
        """Those that were asked for."""
        self.steps = steps(recipe)
        """Of its phases."""
        reference = recipe.deepspeed
        if device.is_gpu and reference.endswith("_auto"):
            reference = reference.removesuffix("auto") + ("bf16" if device.has_bf16 else "fp32")
        self.reference = resolved_name(reference)
        """Of its DeepSpeed config."""

    def deepspeed(self, phase: TrainingPhase | None = None) -> dict[str, Any]:
        """The config of a phase's engine; None: of one without training."""
        return deepspeed_config(self.reference, phase, self.ranks)

    def zero(
        self, config: dict[str, Any], teachers: Mapping[str, PlannedModel], stage: int | None = None
    ) -> Zero:
        """What a config means beside live teachers. stage: in place of its own."""
        section = config.get("zero_optimization", {})
        if stage is not None:
            section = {**section, "stage": stage}
        return Zero.of(
            {**config, "zero_optimization": section},
            self.ranks,
            model_dtype(config).itemsize,
            self.recipe.student_resident,
            max((teacher.layer_numel() for teacher in teachers.values()), default=0),
        )

    def model(self, name: str, number: int) -> PlannedModel:
        """The model `name` as phase `number` finds it: of the size of what it came from."""
        step, recipe = self.steps[number], self.recipe
        found = step.model(name)
        key = found.origin, step.task_name, found.vocabulary
        if key not in self.models:
            is_student = found.origin == "student"
            given = recipe.student if is_student else recipe.teachers[found.origin]
            assert given.model is not None
            config, shipped = known_config(given.model, given.revision, recipe.models_folder)
            if is_student:
                config = student_of(config, recipe.student)
            if found.vocabulary is not None:
                config = copy.deepcopy(config)
                config.vocab_size = max(config.vocab_size, found.vocabulary)
            classes = len(self.labels(step.task_name)) or step.task.outputs
            of_task = step.task.heads[0], classes
            model = PlannedModel(found.origin, given.model, config, shipped, *of_task)
            self.models[key] = model
        return self.models[key]

    def teachers(self, number: int, phase: Cache | Distil) -> dict[str, PlannedModel]:
        """Those of a phase that are models: what is in files is looked up."""
        names = self.recipe.teachers_of(phase)
        return {n: self.model(n, number) for n in names if n not in self.recipe.from_files}

    @cache  # noqa: B019  (a recipe's few tasks)
    def labels(self, task: str) -> list[str]:
        """Of a task; none where it has no classes."""
        settings = self.recipe.tasks_by_name[task]
        if settings.given_labels is not None:
            return settings.given_labels
        try:
            return open_source(settings, data_folder=self.recipe.data_folder).labels
        except UserError as error:
            self.notes.append(
                "the number of labels is neither in the recipe nor could it be read: 2 are "
                f"assumed ({first_line(error)})"
            )
            return ["0", "1"]

    @cache  # noqa: B019  (a recipe's few splits)
    def split(self, task: str, split: str) -> SplitFacts:
        """What is known of a split of a task."""
        facts = split_facts(self.recipe, self.recipe.tasks_by_name[task], split)
        if facts.why_not is not None:
            self.notes.append(
                f"split {split}: its examples could not be counted, so each is taken to be "
                f"{facts.tokens:.0f} tokens long, and there is no total time ({facts.why_not})"
            )
        return facts

    def chosen(self, number: int, phase: TrainingPhase, examples: int) -> int:
        """How many of a split's examples a phase trains on. Raises UserError where it chooses among
        them and they cannot be read, and for a class that is none of the task's."""
        if not isinstance(phase, FineTune) or not (phase.focus or phase.per_class):
            return examples
        step = self.steps[number]
        labels = self.labels(step.task_name)
        refuse(label_mistakes(step.name, phase, labels), self.recipe.location_of)
        source = open_source(step.task, data_folder=self.recipe.data_folder)
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
    if task.cuts:
        return SplitFacts(split, len(data), float(np.minimum(lengths, task.max_length).mean()))
    windows = 1 + np.ceil(
        np.maximum(lengths - task.max_length, 0) / (task.max_length - task.overlap)
    )
    tokens = float((lengths + (windows - 1) * task.overlap).sum() / windows.sum())
    return SplitFacts(split, round(len(data) * float(windows.mean())), tokens)
