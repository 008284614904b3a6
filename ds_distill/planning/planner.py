"""Plans a recipe phase by phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ds_distill.check.models import expanded_mistakes, one_head_mistakes
from ds_distill.check.phases import phase_mistakes
from ds_distill.data.schedule import PADDED_BATCH, TOKENS_PER_CALL
from ds_distill.engine.precision import model_dtype
from ds_distill.errors import Mistake, refuse
from ds_distill.planning.activations import run_packed, teacher_memory
from ds_distill.planning.facts import Facts
from ds_distill.planning.memory import inference_states
from ds_distill.planning.models import Pass
from ds_distill.planning.placements import Job
from ds_distill.planning.plan import BreakEven, CachePlan, JobPlan, Plan
from ds_distill.planning.times import communication_seconds, pass_seconds, sent_by_teachers
from ds_distill.recipe import Recipe
from ds_distill.recipe.codecs import CODECS
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.phases import Cache, Distil, PhaseSettings, TrainingPhase, training_name

_KEY = 16
"""Bytes of an example's content key."""


class Planner(Facts):
    """Plans the phases of a recipe for a device and a number of ranks."""

    def plan(self) -> Plan:
        """Of all phases. Raises UserError for a recipe that `check` refuses before it reads models
        and data."""
        refuse(_mistakes(self.recipe), self.recipe.location_of)
        plan = Plan(self.recipe.name, self.device, self.ranks)
        for number, phase in enumerate(self.recipe.phases):
            if isinstance(phase, Cache):
                left_out = phase.is_left_out(self.recipe.phases[number + 1 :])
                if not left_out and self.teachers(number, phase):
                    plan.caches.append(self._cache(number, phase))
            elif isinstance(phase, TrainingPhase):
                alike: dict[tuple[str, ...], list[str]] = {}  # by the models that they start from
                for outputs in phase.trainings:
                    starts = tuple(map(phase.start_of, outputs))
                    alike.setdefault(starts, []).append(training_name(outputs))
                for starts, trainings in alike.items():
                    job = self._job(number, phase, starts)
                    plan.jobs.append(job.plan(trainings))
                    plan.break_even.extend(self._break_even(job, plan.jobs[-1]))
        plan.models.extend({model.name: model for model in self.models.values()}.values())
        plan.notes.extend(dict.fromkeys([*self.notes, *self._model_notes()]))
        return plan

    def _model_notes(self) -> Iterator[str]:
        shipped = dict.fromkeys(one.reference for one in self.models.values() if one.shipped)
        if shipped:
            yield (
                f"configurations that come with ds_distill are used for {', '.join(shipped)}: the "
                "models' own could not be read"
            )
        if model_dtype(self.deepspeed()) == torch.bfloat16 and not self.device.has_bf16:
            yield (
                f"{self.device.name} has no bf16, and deepspeed={self.reference} computes in it: "
                "it runs without tensor cores, or not at all. Use a config of fp16 or fp32."
            )

    # ---------------------------------------------------------------------------- trainings

    def _job(self, number: int, phase: TrainingPhase, starts: tuple[str, ...]) -> Job:
        """Of trainings that differ in what they learn from alone. starts: the models of each.

        Raises UserError for models that do not go together."""
        students = [self.model(start, number) for start in starts]
        if len(students) > 1:
            configs = {f"teachers.{one.name}": one.config for one in students}
            setting = f"phases.{self.steps[number].name}.shared_head=true"
            refuse(one_head_mistakes(setting, configs), self.recipe.location_of)
        teachers, cache = {}, None
        if isinstance(phase, Distil) and (teachers := self.teachers(number, phase)):
            cache = self._cache_for(number, phase)
        return Job(self, number, phase, students, teachers, cache)

    def _break_even(self, job: Job, plan: JobPlan) -> Iterator[BreakEven]:
        """Nothing where no cache can hold what the phase asks of its teachers, or none is a
        model."""
        live, cached = (plan.placement(kind, plan.chosen.choice) for kind in ("live", "cached"))
        if live is None or cached is None or job.cache is None:
            return
        phase, examples = job.phase, plan.split.examples
        batch = plan.micro_batch * plan.micro_steps * self.ranks
        building = batch / self._cache(job.number, job.cache).examples_per_second
        epochs = phase.epochs
        if phase.steps is not None and examples is not None:
            epochs = round(phase.steps * phase.batch_size / examples)
        seconds = live.step.total, cached.step.total
        yield BreakEven(plan.phase, building, *seconds, len(plan.models) * epochs)

    # ------------------------------------------------------------------------------- caches

    def _cache(self, number: int, phase: Cache) -> CachePlan:
        """Of a phase that stands at a number, or could: teachers run one after the other, each
        alone in memory."""
        step, config, teachers = self.steps[number], self.deepspeed(), self.teachers(number, phase)
        task, dtype, zero = step.task, model_dtype(config), self.zero(config, teachers)
        splits = [self.split(step.task_name, split) for split in phase.splits]
        one = Pass(1, task.max_length, task.row_share, dtype, self.device.is_gpu, fused=True)
        packs = run_packed(self.recipe, teachers.values(), one)
        given = phase.batch_size or (None if packs else PADDED_BATCH)
        # The longest decide what is held, those of the mean length the time.
        longest, usual = (
            replace(one, examples=given or max(1, TOKENS_PER_CALL // length), length=length)
            for length in (task.max_length, round(max(split.tokens for split in splits)))
        )
        most, per_batch, each = 0, 0.0, float(_KEY)
        for name, model in teachers.items():
            numels = {name: model.numels()}
            held = inference_states(numels, zero).total + teacher_memory(model, longest).here
            most = max(most, held)
            per_batch += pass_seconds(model, usual, self.device)
            sent = sent_by_teachers(numels, zero, 1)
            per_batch += communication_seconds(sent, self.ranks, self.device)
            sizes = model.width, model.classes, model.config.vocab_size
            each += phase.example_bytes(task, *sizes, usual.length)
        rate = self.ranks * usual.examples / per_batch / task.variants
        known = [split.examples for split in splits if split.examples is not None]
        examples = sum(known) if len(known) == len(splits) else None
        return CachePlan(
            phase=step.name,
            bytes_per_example=each,
            examples=examples,
            bytes=None if examples is None else round(examples * each),
            examples_per_second=rate,
            build_seconds=None if examples is None else examples / rate,
            memory=most,
            fits=most <= self.device.usable,
        )

    def _cache_for(self, number: int, phase: Distil) -> Cache | None:
        """The cache phase that a phase would read: one of the recipe, or one that could stand
        before it; None where `check` refuses each."""
        reads = phase.model_copy(update={"teachers": "cached"})
        before = self.recipe.phases[:number]

        def reading(*phases: PhaseSettings) -> Recipe:
            return self.recipe.model_copy(update={"phases": [*before, *phases, reads]})

        step = steps(reading())[number]
        needs = [part.all_needs() for _, part in phase.parts()]
        hidden = {layer for one in needs for layer in one.states}
        if step.fitted_states and any(one.fitted_states for one in needs):
            hidden.add(-1)
        made = (
            Cache(
                splits=[phase.split],
                task=phase.task,
                follow=phase.followed,
                hidden=sorted(hidden),
                codec=codec.model_validate({"temperature": phase.temperature}),
            )
            for codec in CODECS.values()
        )
        found = (*(one for _, one in step.caches(phase.split)), *made)
        return next((kept for kept in found if not any(_mistakes(reading(kept)))), None)


def _mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """What `check` finds before it reads models and data, of phases alone."""
    yield from phase_mistakes(recipe)
    yield from expanded_mistakes(recipe, {}, {})
