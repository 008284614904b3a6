"""A run: the object that every phase receives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ds_distill.data.batches import CachedSignals, Collator, Units
from ds_distill.data.sources import Source
from ds_distill.data.tokenise import TokenTable
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.models.configuration import load_config
from ds_distill.models.file_teacher import FileTeacher
from ds_distill.models.labels import LabelMap, class_names, label_map, tag_map
from ds_distill.models.packing import packed_attention, packed_backend
from ds_distill.models.reference import ModelReference
from ds_distill.models.student import student_config
from ds_distill.process.peak_memory import PeakMemory
from ds_distill.recipe import LONE_TASK, Recipe
from ds_distill.recipe.lineage import model_at
from ds_distill.recipe.references import predictions_file, resolve_model
from ds_distill.recipe.schema import Teacher
from ds_distill.recipe.tasks import TASKS
from ds_distill.recipe.training import Training
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.observer import Observer
from ds_distill.tasks import TaskKind
from ds_distill.tasks.kind import TaskData


class Run:
    """Recipe, folder, processes, log, data and models of a run, as the phases of one of its tasks
    find them."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        world: World,
        log: RunLog,
        source: Source,
        task_name: str = LONE_TASK,
        observer: Observer | None = None,
    ) -> None:
        """source: of the task's data. observer: observes the trainings."""
        self.recipe, self.folder, self.world, self.log = recipe, folder, world, log
        self.observer = observer
        self.peak_memory = PeakMemory(world.device)
        self.planned_bytes: Mapping[tuple[int, str], int] = {}
        """Of a training, by its phase's number and its model, on the main process of GPUs."""
        self.task_name, self.task = task_name, recipe.tasks_by_name[task_name]
        self.phases = {
            number: phase
            for number, phase in enumerate(recipe.phases)
            if recipe.task_name(phase) == task_name
        }
        """Those of the task, by their numbers in the recipe."""
        self.labels: list[str] = source.labels
        part = None if recipe.task is not None else task_name  # the only one has no part
        self.fitted, self.comparison = folder.fitted(part), folder.comparison(part)
        """The files of what the task's expertise phase fits, and of its comparison of policies."""
        self.kind: TaskKind[Any, Any] = TASKS[self.task.type].load()(self.task, self.labels)
        self.data = TaskData(
            recipe,
            task_name,
            source,
            folder.data(part),
            world,
            kind=self.kind,
            models=lambda: [self.reference(name, 0) for name in (*recipe.teachers, "student")],
            bar=log.bar,
        )

    # ----------------------------------------------------------------------- batches

    def collator(
        self,
        examples: Units,
        tables: Mapping[str, TokenTable],
        references: Sequence[ModelReference],
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
        every_token: bool = False,
        labels_alone: bool = False,
    ) -> Collator:
        """The task's batches of a split for models; see `Collator`, `TaskKind.rows`.

        references: those that the tables are of. labels_alone: for a training without teachers.
        """
        vocabulary = partial(self.data.shared_tokens, references)
        kind = self.kind
        rows = kind.label_rows(vocabulary) if labels_alone else kind.rows(vocabulary, every_token)
        return Collator(examples, tables, rows, cached, packed)

    # ----------------------------------------------------------------------- models

    def teachers(self, number: int) -> list[str]:
        """Names of the teachers that phase `number` has: those that it follows, or the recipe's,
        less those that an earlier phase of the task has left out. Every rank reads it from that
        phase's record."""
        for phase in self.recipe.phases[number : number + 1]:  # none behind the last one
            if phase.followed is not None:
                return phase.followed
        names = self.recipe.phase_names()
        for earlier, phase in reversed(self.phases.items()):
            if earlier < number and phase.leaves_out_teachers:
                record = self.folder.read_record(earlier, names[earlier])
                assert record is not None, "phases run in order"
                remaining: list[str] = record["teachers"]
                return remaining
        return list(self.recipe.teachers)

    def reference(self, name: str, number: int) -> ModelReference:
        """The model `name` at the start of phase `number`: from the last earlier phase that trained
        it, else from the recipe."""
        made = model_at(self.recipe, name, number)
        if made.made_by is not None and made.head is not None:
            model = str(self.folder.model(made.made_by, name))
            tags = self._tags_of(model, made.head)
            return ModelReference(name, model, head=made.head, label_map=tags)
        if (path := self.recipe.from_files.get(name)) is not None:
            file = predictions_file(name, path, self.recipe.data_folder)
            return replace(self.reference("student", 0), name=name, predictions=file)
        given = self.recipe.student if name == "student" else self.recipe.teachers[name]
        assert given.model is not None
        model = resolve_model(given.model, self.recipe.models_folder)
        if not isinstance(given, Teacher):
            config = student_config(self.recipe) if given.config is not None else None
            truncated = given.start == "truncated"
            return ModelReference(name, model, given.revision, given.layers, config, truncated)
        try:
            found = self.given_labels(name)
        except UserError:
            if self.recipe.task is not None:
                raise
            found = None  # another task's: `check` refuses it where the teacher teaches this one
        return ModelReference(name, model, given.revision, label_map=found)

    def given_labels(self, teacher: str) -> LabelMap | None:
        """Which outputs of a teacher, as the recipe gives it, are the task's labels. None: all, in
        the same order, or the recipe does not say. Raises UserError where it says others."""
        given = self.recipe.teachers[teacher]
        if given.labels is None or not self.labels:
            return None
        assert given.model is not None
        model = resolve_model(given.model, self.recipe.models_folder)
        config = load_config(model, given.revision)
        return label_map(model, config, self.task, self.labels, given.labels)

    def knows(self, teacher: ModelReference, examples: Units) -> np.ndarray:
        """Of which examples a teacher can be asked: bool [N]. One from a file says something of
        those that stand there; of a text's windows of all, or of none."""
        if teacher.predictions is None:
            return np.ones(len(examples), dtype=bool)
        there = self.data.predictions(teacher.predictions).find(examples.keys.numpy()) >= 0
        return examples.of_whole_examples(there)

    def _tags_of(self, model: str, head: str) -> LabelMap | None:
        """Which tags of a model that was trained on another task of words are this task's."""
        if head == self.task_name or not self.recipe.takes_head(self.task_name, head):
            return None
        return tag_map(class_names(load_config(model)), self.labels)

    def packed(self, reference: ModelReference, *, half: bool) -> str | None:
        """The attention backend of a model that runs without padding; None for one that runs with
        padding.

        half: whether the model computes in bf16 or fp16.

        Raises UserError where it is to run without padding, and cannot on this device.
        """
        if reference.predictions is not None:
            return None
        by_default = half and self.world.device.type == "cuda"
        padding = self.recipe.padding
        if padding == "always" or (padding is None and not by_default):
            return None
        config = load_config(reference.model, reference.revision)
        backend = packed_backend(config, self.world.device, half=half)
        if backend is None and padding == "never":
            raise UserError(
                f"padding=never: {reference.name} ({config.model_type}) cannot run without padding "
                "on this device: for its type, the width of its heads, the GPU's generation or a "
                "package that lacks. Leave padding out: each model then runs as it can."
            )
        return backend

    def model(
        self, reference: ModelReference, *, new_head: bool = False, packed: bool = False
    ) -> PreTrainedModel | FileTeacher:
        """Load a model with the task's head, see `TaskKind.load`; or a teacher's predictions.

        new_head: the model will be trained; if it has no head of the task, it gets a new one.
        packed: the model will take packed views.
        """
        if reference.predictions is not None:
            return FileTeacher(self.data.predictions(reference.predictions))
        # On CPU the backward pass of torch's fused attention takes twice as long as the plain
        # one's (bf16, MiniLM at 40 tokens: 348 against 200 ms a step). A model that only runs
        # forward has the attention that transformers chooses, as when its user loads it. On a GPU
        # that would wait for the device in each pass, to see whether a batch has padding.
        on_cpu = self.world.device.type == "cpu"
        attention = "eager" if new_head and on_cpu else None
        if packed or not on_cpu:
            config = load_config(reference.model, reference.revision)
            attention = packed_attention(config) or attention
        options: dict[str, Any] = {
            "revision": reference.revision,
            "layers": reference.layers,
            "config": reference.config,
            "truncated": reference.truncated,
            "new_head": (new_head or reference.new_head) and reference.head != self.task_name,
            "seed": self.recipe.seed,
            "attention": attention,
        }
        labels = self.labels
        if reference.label_map is not None and not options["new_head"]:
            # All classes of the checkpoint, in its order.
            labels = class_names(load_config(reference.model, reference.revision))
        return self.kind.load(self.data, reference.model, labels, **options)

    # ----------------------------------------------------------------------- engine

    def deepspeed(self, training: Training | None = None) -> dict[str, Any]:
        """The DeepSpeed config of a phase."""
        return deepspeed_config(self.recipe.deepspeed, training, self.world.size)
