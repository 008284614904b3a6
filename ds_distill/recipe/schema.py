"""The keys of a recipe. Every field's docstring is its documentation.

A recipe is YAML; `recipe.load` turns it into these models. Nothing here reads a file or
imports torch, so that `ds-distill check` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from ds_distill.errors import Mistake
from ds_distill.recipe.part import Package, a_key_each, names_alone
from ds_distill.recipe.phases import PHASES, PhaseSettings
from ds_distill.recipe.section import MAY_CHANGE, Count, LabelMap, Name, Section, keyed, refused
from ds_distill.recipe.tasks import Task, TaskSettings
from ds_distill.recipe.text import Places, one_key
from ds_distill.recipe.training import Training

LONE_TASK = "task"
"""The name of a recipe's task where it has but one, under the key of that name."""

Seed = Annotated[int, Field(ge=0, lt=2**31)]


# ---------------------------------------------------------------------------------- models


class Teacher(Section):
    """A frozen encoder, or a file of what anything else has predicted."""

    model: str | None = None
    """Hub id, local folder, or `pkg:PACKAGE/FOLDER` (a folder inside an installed
    package). Weights must be safetensors."""
    predictions: str | None = None
    """In place of `model`: a file of what an LLM, an ensemble, a rule or a person predicted of the
    task's texts, jsonl, csv, tsv or parquet, with the columns of the text or of the words, or
    with `data.columns.id`; and `predicted`, `probabilities` or `logits` (docs/own-data.md).
    `data:NAME` is the file in `data_folder`. Of texts or words with labels, or of numbers."""
    revision: str | None = None
    """Commit of a hub model."""
    labels: LabelMap | None = None
    """For a fine-tuned classifier whose classes are not the task's, or have other names, or another
    order: a class of the checkpoint, by its name or its number from 0, to the task's label. The
    probabilities of several classes of one label add. A class with null, or not named, is none of
    the task's: it is left out, and the probabilities are over the others. A label without a class
    is one that this teacher does not know."""
    below_majority: Annotated[Literal["stop", "warn"], MAY_CHANGE] = "stop"
    """Before a student learns from it, each teacher is scored on `validation`, where that has
    labels. One that is right there less often, beyond chance, than always answering the commonest
    label, and no better by the task's metric, such as a classifier whose classes are in another
    order, ends the run, or is warned of."""

    @classmethod
    def key_rules(cls, data: dict[Any, Any]) -> Iterator[Mistake]:
        given = [key for key in ("model", "predictions") if data.get(key) is not None]
        if not given:
            what = "is required and missing: name a model, or a file of `predictions`"
            yield Mistake("model", what)
        elif len(given) > 1:
            yield Mistake("predictions", "stands beside `model`: keep one of them")
        for key in ("revision", "labels") if given == ["predictions"] else ():
            if data.get(key) is not None:
                why = "is of a `model`, and this teacher is a file of predictions: take it out"
                yield Mistake(key, why)


class Sizes(Section):
    """What a student has otherwise than its `model`, under transformers' names. What is not named
    stays as there."""

    hidden_size: Count | None = None
    """Width of its states."""
    num_hidden_layers: Annotated[Count, Field(le=1000)] | None = None
    """Its depth."""
    num_attention_heads: Annotated[Count, Field(le=1000)] | None = None
    """Heads of each layer; they divide `hidden_size`."""
    intermediate_size: Count | None = None
    """Width inside its feed-forward layers; four times `hidden_size` in BERT."""


class Student(Section):
    """The encoder that is trained and shipped."""

    model: str
    """Reference as for a teacher: the weights it starts from. With `config` the model whose kind,
    vocabulary and other settings it has."""
    revision: str | None = None
    """Commit of a hub model."""
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Layers of `model` that it keeps, counted from 0, e.g. [0, 2, 4, 7, 9, 11]. Default:
    all."""
    config: Sizes | None = None
    """Sizes of its own, e.g. {hidden_size: 312, num_hidden_layers: 4, intermediate_size: 1200}."""
    start: Literal["random", "truncated"] | None = None
    """What a student with `config` begins with. `random` (default): weights that follow from
    `seed`; none of `model` are read. `truncated`: of each of `model`'s weights the first rows and
    columns, as many as it has, in its first layers or those of `layers`; no size may be larger than
    the model's."""

    @property
    def is_random(self) -> bool:
        """Whether it has no weights of `model`."""
        return self.config is not None and self.start != "truncated"

    @model_validator(mode="after")
    def _weights_are_of_one_kind(self) -> Student:
        if self.config is None and self.start is not None:
            what = f"{self.start} is of a student with sizes of its own: give `config`"
            raise refused([Mistake("start", what)])
        if self.is_random and self.layers is not None:
            what = "stands beside `config`, whose weights are random: keep one of them"
            raise refused([Mistake("layers", what)])
        if self.config is not None and self.layers and self.config.num_hidden_layers is not None:
            what = "stands beside `layers`, which say how many there are: take it out"
            raise refused([Mistake("config.num_hidden_layers", what)])
        return self


# ---------------------------------------------------------------------------------- recipe


class _OnePhase:
    """Reads an item of `phases`, {KIND: {...}}; a phase that trains starts from `training`."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        names = [handler.generate_schema(name) for name in names_alone(PHASES)]
        return core_schema.with_info_plain_validator_function(
            _read,
            json_schema_input_schema=core_schema.union_schema(
                [a_key_each(PHASES, handler), *names]
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda phase: {phase.kind: phase.as_written(without=["kind"])}
            ),
        )


def _read(item: Any, info: ValidationInfo) -> PhaseSettings:
    if isinstance(item, PhaseSettings):
        return item
    kind, body = one_key(item)
    if kind in PHASES and issubclass(PHASES[kind], Training):
        shared = info.data.get("training", Training())  # not there where it has mistakes
        body = {**shared.inherited(body), **body}
    return keyed("phase", PHASES, {kind: body})[kind]


Phase = Annotated[PhaseSettings, _OnePhase()]


class Logging(Section):
    """Where events go beside the console and metrics.jsonl."""

    every: Count = 10
    """Optimizer steps between two events."""
    wandb: str | None = None
    """Project of Weights & Biases; WANDB_MODE=offline keeps it local."""
    tensorboard: bool = False
    """Write TensorBoard files to the run's folder."""


class Recipe(Section):
    """One run: tasks, teachers, student, phases."""

    gone: ClassVar[dict[str, tuple[object, str]]] = {
        "seeds": (None, "`ds-distill sweep RECIPE seed=1,2,3` runs it with each seed")
    }

    _places: Places = PrivateAttr(default_factory=Places)

    imports: Annotated[list[Package], Field(alias="import")] = Field(default_factory=list)
    """Python packages, installed or on PYTHONPATH, with parts that the recipe names
    (docs/extending.md). Their code runs: name those that you trust."""
    name: Name = "recipe"
    """Part of the run's folder, runs/NAME. Default: the recipe file's name without its ending."""
    description: str = ""
    """One line, which the report and `ds-distill recipes` show."""
    seed: Seed = 0
    """Of all random choices: weights of new heads, batches, dropout, random policies."""
    task: Task | None = None
    """What is learnt, and from which data. Short for `tasks` with one task."""
    tasks: dict[Name, Task] = Field(default_factory=dict)
    """Several tasks, each under a name of your choice, which phases then say as `task: NAME`. A
    model keeps its name across tasks; its head belongs to the task that it was last trained on."""
    teachers: dict[Name, Teacher] = Field(default_factory=dict)
    """The teachers, each under a name of your choice."""
    student: Student
    training: Training = Training()
    """Settings that every training phase starts from."""
    phases: Annotated[list[Phase], Field(min_length=1)]
    """What is done, in this order. Each is one key, the phase's kind, with its settings."""
    ships: Name | None = None
    """Name (`save_as`) of the student that the run ships. Default: of those that were distilled the
    best on `validation`, or without that the last."""
    deepspeed: str = "zero1_fp32"
    """A config of ds_configs/deepspeed by name, or the path of a DeepSpeed JSON file. A name with
    `_auto` in place of `_bf16` is in bf16 where the device computes in it, else in fp32; one with
    `_fp16` is for GPUs without bf16."""
    padding: Literal["always", "never"] | None = None
    """Whether models that only run forward (teachers; all models in evaluation) get their batches
    padded. Default: on a GPU, models that compute in bf16 or fp16 and can do without padding do
    (teachers under such a config; evaluation is in fp32); else padded.
    `never` holds on any device, and refuses a model that needs padding."""
    student_resident: Annotated[bool, MAY_CHANGE] = True
    """With ZeRO stage 3: keep the student whole on each rank while teachers are sharded."""
    models_folder: str | None = None
    """Folder with local copies of hub models: org/name is looked for as FOLDER/org/name
    and FOLDER/name."""
    data_folder: str | None = None
    """Folder with data sets: `data:NAME`, as a path of data, is FOLDER/NAME."""
    logging: Annotated[Logging, MAY_CHANGE] = Logging()
    timeout_minutes: Annotated[float, Field(gt=0), MAY_CHANGE] = 10.0
    """With several ranks: minutes that they wait for one that does not come, or does not go on.
    Then the run ends, and names it. Raise it where one step of the work takes longer."""

    @classmethod
    def key_rules(cls, data: dict[Any, Any]) -> Iterator[Mistake]:
        if data.get("task") is None and not data.get("tasks"):
            yield Mistake("task", "is required and missing")
        if data.get("task") is not None and data.get("tasks"):
            yield Mistake("task", "stands beside `tasks`: keep one of them")

    @model_validator(mode="after")
    def _tasks_are_named(self) -> Recipe:
        if not self.tasks_by_name:  # a mistake of keys
            return self
        for name, task in self.tasks.items():
            task.stands_at(f"tasks.{name}")
        mistakes = []
        for number, phase in enumerate(self.phases):
            at = f"phases.{number}.{phase.kind}.task"
            if phase.task is not None and phase.task not in self.tasks_by_name:
                known = ", ".join(self.tasks) or "`task`, which has no name: leave the key out"
                what = f"there is no task {phase.task!r}. There is: {known}"
                mistakes.append(Mistake(at, what))
            elif phase.task is None and len(self.tasks) > 1:
                names = ", ".join(self.tasks)
                what = f"is required, because there are several: {names}"
                mistakes.append(Mistake(at, what))
            else:
                self.phases[number] = phase.of_task(self.task_of(phase))
        if mistakes:
            raise refused(mistakes)
        return self

    def stands_at(self, places: Places) -> None:
        """Keep where its keys stand, for `location_of`."""
        self._places = places

    def location_of(self, key: str) -> str | None:
        """File and line of a key as messages and overrides have it, such as
        `phases.distil.losses.kl`; None of one that is not known."""
        first, *others = key.split(".")
        at: tuple[str | int, ...] = (first, *others)
        if first == "phases" and others:
            if others[0] not in self.phase_names():
                return None
            number = self.phase_names().index(others[0])
            at = (first, number, self.phases[number].kind, *others[1:])
        return self._places.of(at) if (first,) in self._places else None

    def phase_names(self) -> list[str]:
        """One name per phase: its own, else its kind, numbered where that repeats."""
        names: list[str] = []
        for phase in self.phases:
            name = phase.name or phase.kind
            suffix = 2
            while name in names:
                name = f"{phase.name or phase.kind}-{suffix}"
                suffix += 1
            names.append(name)
        return names

    def named_phases(self, task: str | None = None) -> list[tuple[str, PhaseSettings]]:
        """The phases in their order, each with its name; of one task alone where it is given."""
        named = zip(self.phase_names(), self.phases, strict=True)
        return [(n, phase) for n, phase in named if task in (None, self.task_name(phase))]

    @property
    def tasks_by_name(self) -> dict[str, TaskSettings]:
        """All tasks; the one of the short form is called `task`."""
        return {LONE_TASK: self.task} if self.task is not None else dict(self.tasks)

    def task_name(self, phase: PhaseSettings) -> str:
        """The name of a phase's task."""
        return phase.task or next(iter(self.tasks_by_name))

    def task_of(self, phase: PhaseSettings) -> TaskSettings:
        """A phase's task."""
        return self.tasks_by_name[self.task_name(phase)]

    def takes_head(self, task: str, head: str) -> bool:
        """Whether models with the head of task `head` run on a task: on its own, and among tasks of
        words, where they may know some of the tags."""
        return head == task or all(self.tasks_by_name[one].of_words for one in (task, head))

    def teachers_of(self, phase: PhaseSettings) -> list[str]:
        """Names of the models that teach in a phase."""
        return list(self.teachers) if phase.followed is None else phase.followed

    @property
    def encoders(self) -> dict[str, str]:
        """The teachers that are models, as the recipe names these; what the others predict is in
        files."""
        return {name: t.model for name, t in self.teachers.items() if t.model is not None}

    @property
    def from_files(self) -> dict[str, str]:
        """The other teachers: the path of each one's file."""
        return {n: t.predictions for n, t in self.teachers.items() if t.predictions is not None}

    @property
    def followed(self) -> set[str]:
        """Names of the models that phases say to follow."""
        return {name for phase in self.phases for name in phase.followed or ()}

    def phases_of(self, task: str) -> Iterator[PhaseSettings]:
        """The phases of a task, in order."""
        return (phase for phase in self.phases if self.task_name(phase) == task)

    def trained_models(self) -> Iterator[tuple[int, str]]:
        """(phase number, name) of each model that a phase trains, in order."""
        for number, phase in enumerate(self.phases):
            for output in phase.outputs:
                yield number, output

    def fitted_splits(self, task: str) -> list[str]:
        """Splits of a task that expertise phases fit on."""
        fits = (phase for phase in self.phases_of(task) if phase.makes == "expertise")
        return sorted({split for phase in fits for split in phase.learns_from})
