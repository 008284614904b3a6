"""The ways of running a training: memory and time of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import torch

from ds_distill.engine.config import batch_shape, micro_batches_together, stages_of, zero_stage
from ds_distill.engine.precision import model_dtype
from ds_distill.errors import UserError
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.models.active_weights import weight_groups
from ds_distill.models.load import freeze_embeddings
from ds_distill.models.shared_head import bundle_of
from ds_distill.planning import times
from ds_distill.planning.activations import Growth, Head, run_packed, student_memory, teacher_memory
from ds_distill.planning.facts import Facts
from ds_distill.planning.gpus import Device
from ds_distill.planning.memory import Zero, training_states
from ds_distill.planning.models import Pass, PlannedModel
from ds_distill.planning.plan import Choice, JobPlan, Placement
from ds_distill.planning.times import StepTime
from ds_distill.planning.trace import Trace
from ds_distill.reads import TOKENS, Reads
from ds_distill.recipe.phases import Cache, Distil, TrainingPhase


class Job:
    """A training, and what it is planned for: the ways of running it, and what they share."""

    def __init__(
        self,
        facts: Facts,
        number: int,
        phase: TrainingPhase,
        students: Sequence[PlannedModel],
        teachers: Mapping[str, PlannedModel],
        cache: Cache | None,
    ) -> None:
        """
        number: of the phase. students: those that are trained together.
        cache: what teachers are cached by; None where they cannot be.

        Raises UserError for layers of a term that the models do not have."""
        self._facts, self.number, self.phase, self._students = facts, number, phase, students
        step = facts.steps[number]
        self._name, self._task, self._teachers, self.cache = step.name, step.task, teachers, cache
        self._labels = facts.labels(step.task_name)
        self._split = facts.split(step.task_name, phase.split)
        self._config = facts.deepspeed(phase)
        self._micro_batch, self._micro_steps = batch_shape(phase, facts.ranks)
        self._terms = self._made_terms()
        self._reads = {
            name: Reads.union(term.teacher_reads(name) for term in self._terms.values())
            for name in self._teachers
        }
        # On a CPU what is trained has the plain attention, see Run.model.
        share, gpu = self._share_of(self._terms), facts.device.is_gpu
        dtype = model_dtype(self._config)
        self._pass = Pass(self._micro_batch, self._task.max_length, share, dtype, gpu, fused=gpu)

    def plan(self, trainings: list[str]) -> JobPlan:
        """Of all ways of running it. trainings: the names of those that are so.

        Raises UserError for a model that cannot be trained so."""
        phase, unable = self.phase, [one for one in self._students if not one.can_checkpoint]
        if phase.activation_checkpointing and unable:
            model = f"{unable[0].reference} ({unable[0].config.model_type})"
            raise UserError(
                f"phases.{self._name}.activation_checkpointing=true: transformers cannot do it "
                f"with {model}. Take it out."
            )
        ways = ["live" if self._teachers else None, *(["cached"] if self.cache is not None else [])]
        others = [
            self._placement(Choice(stage, teachers, checkpointing))
            for teachers in ways
            for stage in stages_of(self._config)
            for checkpointing in ((False,) if unable else (False, True))
        ]
        teachers = phase.teachers if isinstance(phase, Distil) and self._teachers else None
        own = Choice(zero_stage(self._config), teachers, phase.activation_checkpointing)
        chosen = next(other for other in others if other.choice == own)
        steps, examples = phase.steps, self._split.examples
        if steps is None and examples is not None:
            examples = self._facts.chosen(self.number, phase, examples)
            steps = -(-examples // phase.batch_size) * phase.epochs
        shape = self._micro_batch, self._micro_steps, self._task.max_length
        return JobPlan(self._name, trainings, *shape, self._split, steps, chosen, others)

    def _made_terms(self) -> dict[str, Term]:
        losses = {name: term.without_examples() for name, term in self.phase.losses.items()}
        configs = {name: teacher.config for name, teacher in self._teachers.items()}
        inputs = TermInputs.of(self._students[0].config, configs, self._labels)
        try:
            return build_terms(losses, inputs)
        except ValueError as error:
            raise UserError(f"{error}.", at=f"phases.{self._name}.losses") from error

    @cached_property
    def _weights(self) -> tuple[list[list[int]], list[int]]:
        """Elements of each weight that is trained, by the optimizer's groups, and of the others."""
        with torch.device("meta"), Trace():
            models = {student.name: student.build() for student in self._students}
            for model in models.values() if self.phase.freeze_embeddings else ():
                freeze_embeddings(model)
            bundle = bundle_of(models, {name: self._made_terms() for name in models}, 0)
            _, groups = weight_groups(bundle)
        trained = {weight for group in groups for weight in group.weights}
        frozen = [one.numel() for one in bundle.parameters() if one not in trained]
        return [[weight.numel() for weight in group.weights] for group in groups], frozen

    # ------------------------------------------------------------------------------ passes

    def _student_pass(self, length: int, checkpointing: bool) -> Pass:
        return replace(
            self._pass,
            length=length,
            trains=True,
            checkpointing=checkpointing,
            freeze=self.phase.freeze_embeddings,
            dropout=self.phase.dropout,
        )

    def _teacher_pass(self, length: int, head: Head | None) -> Pass:
        """Of a live one, see phases/distil.py. Of DeBERTa on a GPU that of its own attention: of
        flashdeberta's few kernels steps were planned at half of what an H200 took. Only what is
        held is flashdeberta's."""
        device, dtype = self._facts.device, self._pass.dtype
        if device.is_gpu and device.has_bf16 and dtype == torch.float32:
            dtype = torch.bfloat16  # by autocast
        logits = head is None or head.of_teachers
        return replace(self._pass, length=length, dtype=dtype, fused=True, logits=logits)

    def _share_of(self, terms: Collection[str]) -> float | None:
        """See `TaskSettings.row_share`; 1 where one of some terms counts every token."""
        every = any(self._terms[name].rows == TOKENS for name in terms)
        return 1.0 if every else self._task.row_share

    def _head(self, live: bool) -> Head | None:
        models, losses = [*self._students[:1], *self._teachers.values()], self.phase.losses
        if self._numbers(models[0]) is not None:
            return None
        reads = {term.reads_logits for term in losses.values()}
        both = {name for name, term in losses.items() if term.reads_logits == "both"}
        lone = live and len(self._teachers) == 1
        linear = {name for name in both if lone and losses[name].logits_in_chunks}
        dense = both - linear
        return Head(
            models[0].config.vocab_size,
            tuple(model.config.hidden_size for model in models[:2]),
            dense="student" in reads or bool(dense),
            chunked=bool(linear),
            recomputes=not dense,
            dense_share=self._share_of(dense),
            chunked_share=self._share_of(linear),
            of_teachers=bool(dense) or "teachers" in reads or len(self._teachers) > 1,
        )

    # -------------------------------------------------------------------------- placements

    def _placement(self, choice: Choice) -> Placement:
        device, (trained, frozen) = self._facts.device, self._weights
        live = self._teachers if choice.teachers == "live" else {}
        zero = self._facts.zero(self._config, live, choice.stage)
        numels = {name: teacher.numels() for name, teacher in live.items()}
        states = training_states(trained, sum(frozen), numels, zero)
        together = self._together(zero.stage)
        student, head, most = self._activations(choice, live, together)
        signals = self._signals(choice, together)
        budget = device.usable - states.total - round(signals.fixed)
        grows = student + head + replace(signals, fixed=0.0)
        # Of a teachers' pass over a step's micro-batches, whatever their number is.
        largest = min(grows.largest(budget), most.largest(budget)) if most.here <= budget else 0
        step, computing = (
            self._step(one, choice, zero, numels, together)
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
            max(1, together // self._micro_steps) if live else 1,
        )

    def _together(self, stage: int) -> int:
        """Micro-batches that live teachers read at once; see training/setup.py."""
        one = self._pass
        signals = sum(
            reads.most_bytes(self._teachers[name].width, one.rows, one.examples * one.length)
            for name, reads in self._reads.items()
        )
        of_teachers = self._teacher_pass(one.length, None)
        packs = run_packed(self._facts.recipe, self._teachers.values(), of_teachers)
        steps = one.examples, self._micro_steps
        return micro_batches_together(stage, *steps, one.length, signals, packs)

    def _activations(
        self, choice: Choice, live: Mapping[str, PlannedModel], together: int
    ) -> tuple[Growth, Growth, Growth]:
        """Of the student, at its head, and of the live teacher that has most."""
        examples, length = self._pass.examples, self._pass.length
        head, own = self._head(bool(live)), self._student_pass(length, choice.checkpointing)
        # Models that are trained together keep what the backward pass needs of all of them.
        each = [student_memory(student, own, head) for student in self._students]
        student, most = sum((body for body, _ in each), Growth()), Growth()
        if live:
            one = self._teacher_pass(length, head)
            peaks = [teacher_memory(teacher, one, together) for teacher in live.values()]
            most = max(peaks, key=lambda growth: growth.here)
            if together == 1:  # what is read of them lives until the loss
                beside = Growth.even(self._read(1), examples)
                student, most = student + beside, most + beside
        if choice.checkpointing:  # inputs of attention are kept, beside what is computed again
            parts = Reads.union(term.reads for term in self._terms.values()).parts
            width = parts * self._students[0].width * own.dtype.itemsize
            student += Growth.even(examples * length * width, examples)
        return student, each[0][1], most

    def _signals(self, choice: Choice, together: int) -> Growth:
        """Bytes of what teachers say: of a cache's what a micro-batch decodes of it, and the states
        of a step's micro-batches; of live ones what all say of the micro-batches that they read at
        once, which is held until the last of them: logits, or features of a head over a vocabulary,
        and the states that terms read."""
        one, teachers = self._pass, self._teachers.values()
        if choice.teachers == "cached":
            assert self.cache is not None
            # Both in fp32.
            row = sum(4 * (self._numbers(t) or t.config.vocab_size) for t in teachers)
            width = 4 * sum(teacher.width for teacher in teachers)
            states = self._rows(self._micro_steps) * len(self.cache.hidden) * width
            return Growth.even(one.rows * row, one.examples) + Growth(states, states)
        if choice.teachers != "live" or together == 1:
            return Growth()
        row = sum(self._numbers(teacher) or teacher.width for teacher in teachers)
        total = self._rows(together) * row * one.dtype.itemsize + self._read(together)
        return Growth(total, total)

    def _read(self, micro_batches: int) -> int:
        """Bytes of the teachers' states, at rows, and inputs of attention, of all tokens, that
        terms read."""
        rows = self._rows(micro_batches)
        tokens = micro_batches * self._pass.examples * self._pass.length
        return self._pass.dtype.itemsize * sum(
            reads.numbers(rows, tokens) * self._teachers[name].width
            for name, reads in self._reads.items()
        )

    def _rows(self, micro_batches: int) -> int:
        return replace(self._pass, examples=micro_batches * self._pass.examples).rows

    def _numbers(self, model: PlannedModel) -> int | None:
        """Logits of a row; None over a vocabulary. A window of a question is a row here: each of
        its tokens may be the answer's start, and its end."""
        return 2 * self._task.max_length if self._task.ragged else model.classes

    def _step(
        self,
        device: Device,
        choice: Choice,
        zero: Zero,
        live: Mapping[str, Sequence[int]],
        together: int,
    ) -> StepTime:
        """live: elements of each weight of the live teachers."""
        (trained, frozen), micro_steps = self._weights, self._micro_steps
        length, head = round(self._split.tokens), self._head(bool(live))
        own, of_head = self._student_pass(length, choice.checkpointing), 0.0
        if head is not None:
            of_head = times.seconds(head.chunked_cost(own), device, own.dtype)
            own = head.of_dense(own)
        of_students = sum(times.pass_seconds(student, own, device) for student in self._students)
        one, teachers = self._teacher_pass(length, head), [self._teachers[name] for name in live]
        one = replace(one, examples=together * one.examples)
        of_teachers = sum(times.pass_seconds(teacher, one, device) for teacher in teachers)
        passes = micro_steps / together
        if together < micro_steps:
            passes = math.ceil(passes)
        layers = micro_steps * sum(student.depth for student in self._students)
        of_layers = layers, passes * sum(teacher.depth for teacher in teachers)
        weights = micro_steps * sum(map(len, trained))
        sent = times.sent_in_training(trained, frozen, live, zero, micro_steps, passes)
        return StepTime(
            teachers=micro_steps / together * of_teachers,
            student=micro_steps * (of_students + of_head),
            optimizer=times.optimizer_seconds([*chain(*trained)], zero, device),
            communication=times.communication_seconds(sent, zero.ranks, device),
            hooks=times.hook_seconds(zero, device, weights, *of_layers),
        )
