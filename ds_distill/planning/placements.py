"""The ways of running a training: memory and time of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch

from ds_distill.engine.config import micro_batches_together
from ds_distill.engine.precision import model_dtype
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.models.active_weights import weight_groups
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import freeze_embeddings
from ds_distill.models.shared_head import SharedHeadBundle, share_head
from ds_distill.planning.activations import (
    Growth,
    Head,
    Shape,
    run_packed,
    student_memory,
    student_pass,
    teacher_memory,
    teacher_pass,
)
from ds_distill.planning.gpus import Device
from ds_distill.planning.memory import Zero, training_states
from ds_distill.planning.models import PlannedModel
from ds_distill.planning.plan import Choice, Placement
from ds_distill.planning.split_sizes import SplitFacts
from ds_distill.planning.times import (
    StepTime,
    communication_seconds,
    hook_seconds,
    optimizer_seconds,
    pass_seconds,
    seconds,
    sent_in_training,
)
from ds_distill.planning.trace import Trace
from ds_distill.reads import TOKENS, Reads
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, TrainingPhase
from ds_distill.recipe.tasks import TaskSettings

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Job:
    """A training, and what it is planned for: the ways of running it, and what they share."""

    recipe: Recipe
    phase: TrainingPhase
    device: Device
    ranks: int
    students: Sequence[PlannedModel]
    """Those that are trained together."""
    teachers: dict[str, PlannedModel]
    labels: list[str]
    """Empty for a task without classes."""
    split: SplitFacts
    config: dict[str, Any]
    """DeepSpeed's."""
    cache: Cache | None
    """What teachers are cached by; None where they cannot be."""
    micro_batch: int
    micro_steps: int

    def __post_init__(self) -> None:
        """Raises ValueError for layers of a term that the models do not have."""
        assert self.weights

    @cached_property
    def weights(self) -> tuple[list[list[int]], list[int]]:
        """Elements of each weight that is trained, by the optimizer's groups, and of the others."""
        with torch.device("meta"), Trace():
            bundle = self._bundle()
            _, groups = weight_groups(bundle)
        trained = {weight for group in groups for weight in group.weights}
        frozen = [one.numel() for one in bundle.parameters() if one not in trained]
        return [[weight.numel() for weight in group.weights] for group in groups], frozen

    @property
    def _student(self) -> PlannedModel:
        return self.students[0]

    @property
    def _dtype(self) -> torch.dtype:
        return model_dtype(self.config)

    @property
    def _task(self) -> TaskSettings:
        return self.recipe.task_of(self.phase)

    def _bundle(self) -> Bundle:
        """What the phase trains, without memory and without teachers."""
        models = {student.name: student.build() for student in self.students}
        if self.phase.freeze_embeddings:
            for model in models.values():
                freeze_embeddings(model)
        if len(models) == 1:
            [model] = models.values()
            return Bundle(model, {}, self._made_terms())
        share_head(models, 0)
        return SharedHeadBundle(models, {name: self._made_terms() for name in models})

    @cached_property
    def _terms(self) -> dict[str, Term]:
        return self._made_terms()

    def _made_terms(self) -> dict[str, Term]:
        own, others = self._student.config, {n: t.config for n, t in self.teachers.items()}
        widths = {name: config.hidden_size for name, config in others.items()}
        depths = {name: config.num_hidden_layers for name, config in others.items()}
        counts = [1] * len(self.labels)
        depth = own.num_hidden_layers
        inputs = TermInputs(own.hidden_size, widths, depth, depths, self.labels, counts, 0)
        losses = {
            name: term.model_copy(update={"class_weights": None})
            if hasattr(term, "class_weights")
            else term
            for name, term in self.phase.losses.items()
        }
        return build_terms(losses, inputs)

    # ------------------------------------------------------------------------------ passes

    def _shape(self, length: int) -> Shape:
        return Shape(length, self._row_share, self._dtype, self.device.is_gpu)

    def _teachers_shape(self, length: int) -> Shape:
        """See phases/distil.py."""
        shape = self._shape(length)
        autocast = shape.on_gpu and shape.dtype == torch.float32 and self.device.has_bf16
        return replace(shape, dtype=torch.bfloat16) if autocast else shape

    @property
    def _row_share(self) -> float | None:
        """See `TaskSettings.row_share`; 1 where a term counts every token."""
        return self._share_of(self._terms, self._task.row_share)

    def _share_of(self, terms: Collection[str], share: T) -> T | float:
        return 1.0 if any(self._terms[name].rows == TOKENS for name in terms) else share

    def _head(self, live: bool) -> Head | None:
        if self._numbers(self._student) is not None:
            return None
        share = self._task.row_share
        assert share is not None
        losses, lone = self.phase.losses, live and len(self.teachers) == 1
        reads = {term.reads_logits for term in losses.values()}
        both = {name for name, term in losses.items() if term.reads_logits == "both"}
        linear = {name for name in both if lone and losses[name].logits_in_chunks}
        dense = both - linear
        models = [self._student, *self.teachers.values()]
        return Head(
            self._student.config.vocab_size,
            tuple(model.config.hidden_size for model in models[:2]),
            dense="student" in reads or bool(dense),
            chunked=bool(linear),
            recomputes=not dense,
            dense_share=self._share_of(dense, share),
            chunked_share=self._share_of(linear, share),
            of_teachers=bool(dense) or "teachers" in reads or len(self.teachers) > 1,
        )

    def _how(self, choice: Choice) -> dict[str, Any]:
        """Options of a student's pass."""
        freeze, dropout = self.phase.freeze_embeddings, self.phase.dropout
        return {"checkpointing": choice.checkpointing, "freeze": freeze, "dropout": dropout}

    # -------------------------------------------------------------------------- placements

    def placement(self, choice: Choice) -> Placement:
        device, live = self.device, choice.teachers == "live"
        teachers = {n: t.numels() for n, t in self.teachers.items()} if live else {}
        section = {**self.config.get("zero_optimization", {}), "stage": choice.stage}
        config = {**self.config, "zero_optimization": section}
        layer = max((self.teachers[name].layer_numel() for name in teachers), default=0)
        resident, size = self.recipe.student_resident, self._dtype.itemsize
        zero = Zero.of(config, self.ranks, size, resident, layer)
        together = self._together(zero.stage)
        trained, frozen = self.weights
        states = training_states(trained, sum(frozen), dict(teachers), zero)
        student, head, most = self._activations(choice, together)
        signals = self._held(choice, together)
        budget = device.usable - states.total - round(signals.fixed)
        grows = student + head + replace(signals, fixed=0.0)
        # Of a teachers' pass over a step's micro-batches, whatever their number is.
        largest = min(grows.largest(budget), most.largest(budget)) if most.here <= budget else 0
        step, computing = (
            self._step(one, choice, zero, teachers, together)
            for one in (device, replace(device, launch=0.0))
        )
        return Placement(
            choice,
            states,
            # Teachers have run, and dropped what they held, before the student begins.
            max(student.here, most.here),
            head.here,
            signals.here,
            largest,
            step,
            computing.total,
            device.usable,
            max(1, together // self.micro_steps) if live else 1,
        )

    def _activations(self, choice: Choice, together: int) -> tuple[Growth, Growth, Growth]:
        """Of the student, at its head, and of the live teacher that has most."""
        live, examples = choice.teachers == "live", self.micro_batch
        head, length, how = self._head(live), self._task.max_length, self._how(choice)
        # Models that are trained together keep what the backward pass needs of all of them.
        each = [
            student_memory(s, self._shape(length), examples, head, **how) for s in self.students
        ]
        student, most = sum((body for body, _ in each), Growth()), Growth()
        if live:
            shape, teachers = self._teachers_shape(length), self.teachers.values()
            peaks = [teacher_memory(one, shape, examples, head, together) for one in teachers]
            most = max(peaks, key=lambda growth: growth.here)
            if together == 1:  # what is read of them lives until the loss
                taken = sum(self._taken(name, examples) for name in self.teachers)
                beside = Growth(taken, 0, taken / examples)
                student, most = student + beside, most + beside
        if choice.checkpointing:  # inputs of attention are kept, beside what is computed again
            parts = Reads.union(term.reads for term in self._terms.values()).parts
            width = parts * self._student.config.hidden_size
            taken = examples * length * width * self._dtype.itemsize
            student = student + Growth(taken, 0, taken / examples)
        return student, each[0][1], most

    def _together(self, stage: int) -> int:
        """Micro-batches that live teachers read at once; see training/setup.py."""
        length = self._task.max_length
        rows, tokens = self._rows(self.micro_batch), self.micro_batch * length
        signals = sum(
            self._reads(name).most_bytes(teacher.config.hidden_size, rows, tokens)
            for name, teacher in self.teachers.items()
        )
        half = self._dtype.itemsize == 2 or self.device.has_bf16  # by autocast
        packs = run_packed(self.recipe, self.device, self.teachers, half=half)
        steps = self.micro_batch, self.micro_steps
        return micro_batches_together(stage, *steps, length, signals, packs)

    def _step(
        self,
        device: Device,
        choice: Choice,
        zero: Zero,
        teachers: Mapping[str, list[int]],
        together: int,
    ) -> StepTime:
        (trained, frozen), micro_steps, examples = self.weights, self.micro_steps, self.micro_batch
        length, head = round(self.split.tokens), self._head(choice.teachers == "live")
        shape = self._shape(length)
        own = student_pass(shape, examples, head, **self._how(choice))
        of_student = sum(pass_seconds(student, own, device) for student in self.students)
        if head is not None:
            of_student += seconds(head.chunked_cost(shape, examples), device, self._dtype)
        one = teacher_pass(self._teachers_shape(length), together * examples, head)
        of_teachers = sum(pass_seconds(self.teachers[name], one, device) for name in teachers)
        passes = micro_steps / together
        if together < micro_steps:
            passes = math.ceil(passes)
        layers = sum(student.config.num_hidden_layers for student in self.students)
        of_live = sum(self.teachers[name].config.num_hidden_layers for name in teachers)
        weights = micro_steps * sum(map(len, trained))
        sent = sent_in_training(trained, frozen, teachers, zero, micro_steps, passes)
        return StepTime(
            teachers=micro_steps / together * of_teachers,
            student=micro_steps * of_student,
            optimizer=optimizer_seconds([*chain(*trained)], zero, device),
            communication=communication_seconds(sent, zero.ranks, device),
            hooks=hook_seconds(zero, device, weights, micro_steps * layers, passes * of_live),
        )

    # ----------------------------------------------------------------------------- signals

    def _held(self, choice: Choice, together: int) -> Growth:
        """Bytes of what teachers say: of a cache's what a micro-batch decodes of it, and the states
        of a step's micro-batches; of live ones what all say of the micro-batches that they read at
        once, which is held until the last of them: logits, or features of a head over a vocabulary,
        and the states that terms read."""
        teachers, batch = self.teachers, self.micro_batch
        if choice.teachers == "cached":
            assert self.cache is not None
            widths = [teacher.config.hidden_size for teacher in teachers.values()]
            # Logits in fp32.
            row = sum(4 * (self._numbers(t) or t.config.vocab_size) for t in teachers.values())
            decoded = self._rows(batch) * row
            states = self._rows(batch * self.micro_steps) * len(self.cache.hidden) * 4 * sum(widths)
            return Growth(decoded + states, states, decoded / batch)
        if choice.teachers != "live" or together == 1:
            return Growth()
        total = 0
        for name, teacher in teachers.items():
            each = self._numbers(teacher) or teacher.config.hidden_size
            total += self._rows(batch * together) * each * self._dtype.itemsize
            total += self._taken(name, batch * together)
        return Growth(total, total)

    def _numbers(self, model: PlannedModel) -> int | None:
        """Logits of a row; None over a vocabulary. A window of a question is a row here: each of
        its tokens may be the answer's start, and its end."""
        return 2 * self._task.max_length if self._task.ragged else model.classes

    def _rows(self, examples: int) -> int:
        share = self._row_share
        return examples if share is None else round(share * examples * self._task.max_length)

    def _taken(self, teacher: str, examples: int) -> int:
        """Bytes of a teacher's states, at rows, and inputs of attention, of all tokens, that terms
        read."""
        tokens = examples * self._task.max_length
        numbers = self._reads(teacher).numbers(self._rows(examples), tokens)
        return numbers * self.teachers[teacher].config.hidden_size * self._dtype.itemsize

    def _reads(self, teacher: str) -> Reads:
        return Reads.union(term.teacher_reads(teacher) for term in self._terms.values())
