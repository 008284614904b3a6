"""The ways of running a training: memory and time of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from ds_distill.engine.config import micro_batches_together
from ds_distill.engine.precision import model_dtype
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.models.active_weights import weight_groups
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import freeze_embeddings
from ds_distill.models.packing import takes_packed
from ds_distill.models.shared_head import SharedHeadBundle, share_head
from ds_distill.planning.activations import (
    Growth,
    Head,
    Shape,
    Work,
    has_flashdeberta,
    student_work,
    teacher_work,
)
from ds_distill.planning.communication import communication_seconds, sent_in_training
from ds_distill.planning.gpus import Device
from ds_distill.planning.memory import Zero, training_states
from ds_distill.planning.models import PlannedModel
from ds_distill.planning.plan import Choice, Placement
from ds_distill.planning.roofline import (
    StepTime,
    hook_seconds,
    optimizer_seconds,
    pass_seconds,
    seconds,
)
from ds_distill.planning.split_sizes import SplitFacts
from ds_distill.planning.trace import Trace
from ds_distill.reads import TOKENS, Reads
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, TrainingPhase
from ds_distill.recipe.tasks import TaskSettings


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

    @property
    def _task(self) -> TaskSettings:
        return self.recipe.task_of(self.phase)

    @property
    def _row_share(self) -> float | None:
        """See `TaskSettings.row_share`; 1 where a term counts every token."""
        every = any(term.rows == TOKENS for term in self._terms.values())
        return 1.0 if every else self._task.row_share

    @cached_property
    def _terms(self) -> dict[str, Term]:
        return self._made_terms()

    def _made_terms(self) -> dict[str, Term]:
        widths = {name: teacher.config.hidden_size for name, teacher in self.teachers.items()}
        labels = self.labels
        width = self._student.config.hidden_size
        depths = {n: teacher.config.num_hidden_layers for n, teacher in self.teachers.items()}
        depth = self._student.config.num_hidden_layers
        inputs = TermInputs(width, widths, depth, depths, labels, [1] * len(labels), 0)
        weighted = {
            name: term.model_copy(update={"class_weights": None})
            if hasattr(term, "class_weights")
            else term
            for name, term in self.phase.losses.items()
        }
        return build_terms(weighted, inputs)

    def _head(self, live: bool) -> Head | None:
        if self._numbers(self._student) is not None:
            return None
        terms, share = self._terms, self._task.row_share
        assert share is not None
        losses, lone = self.phase.losses, live and len(self.teachers) == 1
        reads = {term.reads_logits for term in losses.values()}
        both = {name for name, term in losses.items() if term.reads_logits == "both"}
        linear = {name for name in both if lone and losses[name].logits_in_chunks}
        dense = both - linear

        def share_of(names: set[str]) -> float:
            every = any(terms[name].rows == TOKENS for name in names)
            return 1.0 if every else share

        config = self._student.config
        widths = [config.hidden_size, *(t.config.hidden_size for t in self.teachers.values())]
        return Head(
            config.vocab_size,
            tuple(widths[:2]),
            dense="student" in reads or bool(dense),
            chunked=bool(linear),
            recomputes=not dense,
            dense_share=share_of(dense),
            chunked_share=share_of(linear),
            of_teachers=bool(dense) or "teachers" in reads or len(self.teachers) > 1,
        )

    def _work(self, choice: Choice, length: int, examples: int, together: int) -> Work:
        live, device = choice.teachers == "live", self.device
        share, head = self._row_share, self._head(live)
        shape = Shape(length, share, self._dtype, device.is_gpu)
        works = [
            student_work(
                student,
                shape,
                examples,
                head,
                checkpointing=choice.checkpointing,
                freeze=self.phase.freeze_embeddings,
                dropout=self.phase.dropout,
            )
            for student in self.students
        ]
        _, at_head, _, beside = works[0]
        # Models that are trained together keep what the backward pass needs of all of them.
        student = sum((activations for activations, *_ in works), Growth())
        most, passes = teacher_work({}, shape, examples, head)
        if live:
            # See phases/distil.py.
            full = self._dtype == torch.float32
            autocast = shape.on_gpu and full and device.has_bf16
            of_teachers = replace(shape, dtype=torch.bfloat16) if autocast else shape
            most, passes = teacher_work(self.teachers, of_teachers, examples, head, together)
            if together == 1:  # what is read of them lives until the loss
                taken = sum(self._taken(name, examples, length) for name in self.teachers)
                beside_student = Growth(taken, 0, taken / examples)
                student, most = student + beside_student, most + beside_student
        if choice.checkpointing:
            taken = self._taken_of_student(examples, length)
            student = student + Growth(taken, 0, taken / examples)
        return Work(student, at_head, most, [own for _, _, own, _ in works], beside, passes)

    def placement(self, choice: Choice) -> Placement:
        device, length = self.device, self._task.max_length
        section = {**self.config.get("zero_optimization", {}), "stage": choice.stage}
        config = {**self.config, "zero_optimization": section}
        live = self.teachers if choice.teachers == "live" else {}
        teachers = {name: teacher.numels() for name, teacher in live.items()}
        trained, frozen = self.weights
        layer = max((self.teachers[name].layer_numel() for name in teachers), default=0)
        zero = Zero.of(
            config, self.ranks, self._dtype.itemsize, self.recipe.student_resident, layer
        )
        together = self._together(zero.stage, length)
        states = training_states(trained, sum(frozen), dict(teachers), zero)
        worst = self._work(choice, length, self.micro_batch, together)
        usual = self._work(choice, round(self.split.tokens), self.micro_batch, together)
        step = self._step(device, usual, zero, teachers, together)
        computing = self._step(replace(device, launch=0.0), usual, zero, teachers, together)
        signals = self._held(choice, together)
        beside = replace(worst, head=worst.head + replace(signals, fixed=0.0))
        return Placement(
            choice,
            states,
            worst.activations,
            worst.head.here,
            signals.here,
            beside.largest(device.usable - states.total - round(signals.fixed)),
            step,
            computing.total,
            device.usable,
            max(1, together // self.micro_steps) if live else 1,
        )

    def _together(self, stage: int, length: int) -> int:
        """Micro-batches that live teachers read at once; see training/setup.py."""
        rows, tokens = self._rows(self.micro_batch, length), self.micro_batch * length
        signals = sum(
            self._reads(name).most_bytes(teacher.config.hidden_size, rows, tokens)
            for name, teacher in self.teachers.items()
        )
        ahead = signals > 0 and (stage == 3 or self._packs)
        return micro_batches_together(
            stage, self.micro_batch, self.micro_steps, length, signals if ahead else None
        )

    @cached_property
    def _packs(self) -> bool:
        half = self._dtype.itemsize == 2 or self.device.has_bf16  # by autocast
        return run_packed(self.recipe, self.device, self.teachers, half=half)

    def _step(
        self,
        device: Device,
        work: Work,
        zero: Zero,
        teachers: Mapping[str, list[int]],
        together: int,
    ) -> StepTime:
        (trained, frozen), micro_steps = self.weights, self.micro_steps
        of_student = sum(
            pass_seconds(student, own, device)
            for student, own in zip(self.students, work.student_passes, strict=True)
        )
        of_student += seconds(work.head_cost, device, self._dtype)
        of_teachers = (
            pass_seconds(self.teachers[name], one, device)
            for name, one in work.teacher_passes.items()
        )
        passes = micro_steps / together
        if together < micro_steps:
            passes = math.ceil(passes)
        layers = sum(student.config.num_hidden_layers for student in self.students)
        of_live = sum(self.teachers[name].config.num_hidden_layers for name in teachers)
        weights = micro_steps * sum(map(len, trained))
        sent = sent_in_training(trained, frozen, teachers, zero, micro_steps, passes)
        return StepTime(
            teachers=micro_steps / together * sum(of_teachers),
            student=micro_steps * of_student,
            optimizer=optimizer_seconds([*chain(*trained)], zero, device),
            communication=communication_seconds(sent, zero.ranks, device),
            hooks=hook_seconds(zero, device, weights, micro_steps * layers, passes * of_live),
        )

    def _held(self, choice: Choice, together: int) -> Growth:
        """Bytes of what teachers say: of a cache's what a micro-batch decodes of it, and the states
        of a step's micro-batches; of live ones see `_signals`."""
        if choice.teachers == "cached":
            assert self.cache is not None
            length, step = self._task.max_length, self.micro_batch * self.micro_steps
            teachers = self.teachers.values()
            row = sum(self._decoded(teacher) for teacher in teachers)
            state = sum(4 * teacher.config.hidden_size for teacher in teachers)
            decoded = self._rows(self.micro_batch, length) * row
            states = self._rows(step, length) * len(self.cache.hidden) * state
            return Growth(decoded + states, states, decoded / self.micro_batch)
        if choice.teachers == "live" and together > 1:
            signals = self._signals(together)
            return Growth(signals, signals)
        return Growth()

    def _numbers(self, model: PlannedModel) -> int | None:
        """Logits of a row; None over a vocabulary. A window of a question is a row here: each of
        its tokens may be the answer's start, and its end."""
        return 2 * self._task.max_length if self._task.ragged else model.classes

    def _decoded(self, teacher: PlannedModel) -> int:
        """Bytes of a row: logits in fp32."""
        numbers = self._numbers(teacher)
        return 4 * (teacher.config.vocab_size if numbers is None else numbers)

    def _signals(self, together: int) -> int:
        """Bytes of what all live teachers say of the micro-batches that they read at once, which
        is held until the last of them: logits, or features of a head over a vocabulary, and the
        states that terms read."""
        examples, length = self.micro_batch * together, self._task.max_length
        total = 0
        for name, teacher in self.teachers.items():
            each = self._numbers(teacher) or teacher.config.hidden_size
            total += self._rows(examples, length) * each * self._dtype.itemsize
            total += self._taken(name, examples, length)
        return total

    def _rows(self, examples: int, length: int) -> int:
        share = self._row_share
        return examples if share is None else round(share * examples * length)

    def _taken(self, teacher: str, examples: int, length: int) -> int:
        """Bytes of a teacher's states, at rows, and inputs of attention, of all tokens, that terms
        read."""
        numbers = self._reads(teacher).numbers(self._rows(examples, length), examples * length)
        return numbers * self.teachers[teacher].config.hidden_size * self._dtype.itemsize

    def _reads(self, teacher: str) -> Reads:
        return Reads.union(term.teacher_reads(teacher) for term in self._terms.values())

    def _taken_of_student(self, examples: int, length: int) -> int:
        """Bytes of the inputs of attention that are kept of a student, beside what is computed
        again."""
        parts = Reads.union(term.reads for term in self._terms.values()).parts
        return examples * length * parts * self._student.config.hidden_size * self._dtype.itemsize


def run_packed(
    recipe: Recipe, device: Device, teachers: Mapping[str, PlannedModel], *, half: bool
) -> bool:
    """Whether all of some teachers run without padding; see `Run.packed`."""
    by_default = recipe.padding is None and device.is_gpu and half
    if not (by_default or recipe.padding == "never"):
        return False
    configs = [teacher.config for teacher in teachers.values()]
    return all(
        has_flashdeberta(one) if one.model_type == "deberta-v2" else takes_packed(one)
        for one in configs
    )
