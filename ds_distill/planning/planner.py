"""Plans a recipe phase by phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from ds_distill.check.models import expanded_mistakes, one_head_mistakes
from ds_distill.check.phases import phase_mistakes
from ds_distill.engine.config import batch_shape, deepspeed_config, stages_of, zero_stage
from ds_distill.engine.precision import model_dtype, resolved_name
from ds_distill.errors import Mistake, UserError, first_line, refuse
from ds_distill.planning.caches import cache_plan
from ds_distill.planning.gpus import Device
from ds_distill.planning.models import PlannedModel, planned_model
from ds_distill.planning.placements import Job
from ds_distill.planning.plan import BreakEven, CachePlan, Choice, JobPlan, Plan
from ds_distill.planning.split_sizes import SplitFacts, count_chosen, label_names, split_facts
from ds_distill.recipe import Recipe
from ds_distill.recipe.codecs import Compact, Dense
from ds_distill.recipe.lineage import model_at, steps
from ds_distill.recipe.phases import (
    Cache,
    Distil,
    FineTune,
    PhaseSettings,
    TrainingPhase,
    training_name,
)
from ds_distill.recipe.tasks import TASKS


class Planner:
    """Plans the phases of a recipe for a device and a number of ranks."""

    def __init__(self, recipe: Recipe, device: Device, ranks: int) -> None:
        self.recipe, self.device, self.ranks = recipe, device, ranks
        reference = recipe.deepspeed
        if reference.endswith("_auto"):
            half = "bf16" if device.has_bf16 else "fp32"
            reference = (
                reference.removesuffix("auto") + half if device.is_gpu else resolved_name(reference)
            )
        self._deepspeed = reference
        self.notes: list[str] = []
        self._models: dict[tuple[str, str, int | None], PlannedModel] = {}

    def plan(self) -> Plan:
        """Of all phases. Raises UserError for a recipe that `check` refuses before it reads models
        and data."""
        refuse(_mistakes(self.recipe), self.recipe.location_of)
        jobs, caches, pays = [], [], []
        for number, phase in enumerate(self.recipe.phases):
            later = self.recipe.phases[number + 1 :]
            if isinstance(phase, Cache) and not phase.is_left_out(later):
                caches += [self._cache(number, phase)] if self.teachers(number, phase) else []
            elif isinstance(phase, TrainingPhase):
                alike: dict[tuple[str, ...], list[str]] = {}  # by the models that they start from
                for outputs in phase.trainings:
                    starts = tuple(map(phase.start_of, outputs))
                    alike.setdefault(starts, []).append(training_name(outputs))
                trained = [self._placed(number, phase, *group) for group in alike.items()]
                jobs += trained
                if isinstance(phase, Distil):
                    pays += self._break_even(number, phase, trained[0])
        models = [*{model.name: model for model in self._models.values()}.values()]
        notes = [*dict.fromkeys([*self.notes, *self._model_notes()])]
        return Plan(self.recipe.name, self.device, self.ranks, models, jobs, caches, pays, notes)

    def _model_notes(self) -> Iterator[str]:
        shipped = dict.fromkeys(one.reference for one in self._models.values() if one.shipped)
        if shipped:
            yield (
                f"configurations that come with ds_distill are used for {', '.join(shipped)}: the "
                "models' own could not be read"
            )
        dtype = model_dtype(deepspeed_config(self._deepspeed, None, 1))
        if dtype == torch.bfloat16 and not self.device.has_bf16:
            yield (
                f"{self.device.name} has no bf16, and deepspeed={self._deepspeed} computes in it: "
                "it runs without tensor cores, or not at all. Use a config of fp16 or fp32."
            )

    # ------------------------------------------------------------------------ what there is

    def model(self, name: str, number: int) -> PlannedModel:
        """The model `name` as phase `number` finds it: of the size of what it came from."""
        task = self.recipe.task_of(self.recipe.phases[number])
        found = model_at(self.recipe, name, number)
        origin, rows = found.origin, found.vocabulary
        key = origin, self.recipe.task_name(self.recipe.phases[number]), rows
        if key not in self._models:
            student = self.recipe.student if origin == "student" else None
            given = student or self.recipe.teachers[origin]
            assert given.model is not None
            classes = len(self.labels(number)) or TASKS[task.type].outputs
            self._models[key] = planned_model(
                origin,
                given.model,
                revision=given.revision,
                models_folder=self.recipe.models_folder,
                student=student,
                vocabulary=rows,
                head=TASKS[task.type].heads[0],
                classes=classes,
            )
        return self._models[key]

    def labels(self, number: int) -> list[str]:
        """The labels of the task of phase `number`; none where it has no classes."""
        return self._labels(self.recipe.task_name(self.recipe.phases[number]))

    @cache  # noqa: B019  (a recipe's few tasks)
    def _labels(self, task: str) -> list[str]:
        try:
            return label_names(self.recipe, self.recipe.tasks_by_name[task])
        except UserError as error:
            self.notes.append(
                "the number of labels is neither in the recipe nor could it be read: 2 are "
                f"assumed ({first_line(error)})"
            )
            return ["0", "1"]

    @cache  # noqa: B019  (a recipe's few splits)
    def _split(self, task: str, split: str) -> SplitFacts:
        """What is known of a split's size."""
        facts = split_facts(self.recipe, self.recipe.tasks_by_name[task], split)
        if facts.why_not is not None:
            self.notes.append(
                f"split {split}: its examples could not be counted, so each is taken to be "
                f"{facts.tokens:.0f} tokens long, and there is no total time ({facts.why_not})"
            )
        return facts

    # -------------------------------------------------------------------------------- phases

    def _placed(
        self, number: int, phase: TrainingPhase, starts: Sequence[str], trainings: list[str]
    ) -> JobPlan:
        """Of trainings that differ in what they learn from alone. starts: of the models of each.

        Raises UserError for a model that cannot be trained so."""
        name = self.recipe.phase_names()[number]
        job = self._job(number, phase, name, [self.model(start, number) for start in starts])
        kinds: list[str | None] = ["live" if job.teachers else None]
        kinds += ["cached"] if job.cache is not None else []
        unable = [student for student in job.students if not student.can_checkpoint]
        if phase.activation_checkpointing and unable:
            model = f"{unable[0].reference} ({unable[0].config.model_type})"
            raise UserError(
                f"phases.{name}.activation_checkpointing=true: transformers cannot do it with "
                f"{model}. Take it out."
            )
        others = [
            job.placement(Choice(stage, kind, checkpointing))
            for kind in kinds
            for stage in stages_of(job.config)
            for checkpointing in ((False,) if unable else (False, True))
        ]
        kind = phase.teachers if isinstance(phase, Distil) and job.teachers else None
        own = Choice(zero_stage(job.config), kind, phase.activation_checkpointing)
        steps, examples = phase.steps, job.split.examples
        if steps is None and examples is not None:
            if isinstance(phase, FineTune) and (phase.focus or phase.per_class):
                examples = count_chosen(self.recipe, name, phase, job.labels)
            steps = -(-examples // phase.batch_size) * phase.epochs
        return JobPlan(
            name,
            trainings,
            job.micro_batch,
            job.micro_steps,
            self.recipe.task_of(phase).max_length,
            job.split,
            steps,
            next(other for other in others if other.choice == own),
            others,
        )

    def _job(
        self, number: int, phase: TrainingPhase, name: str, students: list[PlannedModel]
    ) -> Job:
        """Of the phase `name`. Raises UserError for models that do not go together."""
        if len(students) > 1:
            configs = {f"teachers.{one.name}": one.config for one in students}
            found = one_head_mistakes(f"phases.{name}.shared_head=true", configs)
            refuse(found, self.recipe.location_of)
        teachers, kept = {}, None
        if isinstance(phase, Distil) and (teachers := self.teachers(number, phase)):
            kept = self._cache_for(number, phase)
        labels = self.labels(number)
        split = self._split(self.recipe.task_name(phase), phase.split)
        config = deepspeed_config(self._deepspeed, phase, self.ranks)
        given = (self.recipe, phase, self.device, self.ranks, students, teachers, labels, split)
        try:
            return Job(*given, config, kept, *batch_shape(phase, self.ranks))
        except ValueError as error:  # of a term: layers that the models do not have
            raise UserError(f"{error}.", at=f"phases.{name}.losses") from error

    def teachers(self, number: int, phase: Cache | Distil) -> dict[str, PlannedModel]:
        """Those of a phase that are models: what is in files is looked up."""
        names = self.recipe.teachers_of(phase)
        return {n: self.model(n, number) for n in names if n not in self.recipe.from_files}

    def _cache(self, number: int, phase: Cache) -> CachePlan:
        return cache_plan(
            self.recipe,
            self.recipe.phase_names()[number],
            phase,
            self.teachers(number, phase),
            [self._split(self.recipe.task_name(phase), split) for split in phase.splits],
            deepspeed_config(self._deepspeed, None, self.ranks),
            self.device,
            self.ranks,
        )

    def _break_even(self, number: int, phase: Distil, job: JobPlan) -> list[BreakEven]:
        """Nothing where no cache can hold what the phase asks of its teachers, or none is a
        model."""
        live, cached = (job.placement(kind, job.chosen.choice) for kind in ("live", "cached"))
        kept = self._cache_for(number, phase)
        if live is None or cached is None or kept is None:
            return []
        batch = job.micro_batch * job.micro_steps * self.ranks
        building = batch / self._cache(number, kept).examples_per_second
        epochs = phase.epochs
        if phase.steps is not None and job.split.examples is not None:
            epochs = round(phase.steps * phase.batch_size / job.split.examples)
        steps = live.step.total, cached.step.total
        return [BreakEven(job.phase, building, *steps, len(job.models) * epochs)]

    def _cache_for(self, number: int, phase: Distil) -> Cache | None:
        """The cache phase that a phase would read: one of the recipe, or one that could stand
        before it; None where `check` refuses each."""
        before = self.recipe.phases[:number]
        reads = phase.model_copy(update={"teachers": "cached"})
        step = steps(_with_phases(self.recipe, [*before, reads]))[number]
        needs = [part.all_needs() for _, part in phase.parts()]
        hidden = {layer for one in needs for layer in one.states}
        if step.fitted_states and any(one.fitted_states for one in needs):
            hidden.add(-1)
        made = [
            Cache(
                splits=[phase.split],
                task=phase.task,
                follow=phase.followed,
                hidden=sorted(hidden),
                codec=codec(temperature=phase.temperature),
            )
            for codec in (Compact, Dense)
        ]
        for kept in (*(one for _, one in step.caches(phase.split)), *made):
            if not _mistakes(_with_phases(self.recipe, [*before, kept, reads])):
                return kept
        return None


def _mistakes(recipe: Recipe) -> list[Mistake]:
    """What `check` finds before it reads models and data, of phases alone."""
    return [*phase_mistakes(recipe), *expanded_mistakes(recipe, {}, {})]


def _with_phases(recipe: Recipe, phases: Sequence[PhaseSettings]) -> Recipe:
    return recipe.model_copy(update={"phases": phases})
