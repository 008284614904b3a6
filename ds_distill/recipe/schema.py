"""What a recipe may say. Every field's docstring is its documentation.

A recipe is YAML; `recipe.load` turns it into these models. Nothing here reads a file or
imports torch, so that `ds-distill check` answers at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of a recipe: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            unknown = [key for key in data if key not in cls.model_fields]
            if unknown:
                nearest = {
                    str(key): difflib.get_close_matches(str(key), cls.model_fields, n=1)
                    for key in unknown
                }
                raise PydanticCustomError(
                    "unknown_keys",
                    "unknown keys",
                    {"nearest": nearest, "known": sorted(cls.model_fields)},
                )
        return data


# --------------------------------------------------------------------------- task and data


class Columns(Section):
    """The names of the columns that hold an example."""

    text: str = "text"
    """The text, or the first of two."""
    text_b: str | None = None
    """The second text of a pair."""
    label: str = "label"
    """The label: a name, or for hub data sets the class id. Absent in unlabelled splits."""


class Data(Section):
    """Where the examples come from."""

    path: str
    """A folder, a file, a data set of the hub, or `docstrings:PACKAGE,PACKAGE` (see
    `ds_distill.data.docstrings`). Folders hold one file per split: jsonl, csv or parquet,
    also gzipped."""
    config: str | None = None
    """The configuration of a hub data set."""
    splits: dict[Name, str] = {}
    """Our split's name to the file's name in the folder, or to the hub's split. Without it
    train, validation, test (and what else is there) are found by their usual names."""
    columns: Columns = Columns()
    per_class: dict[Name, Count] = {}
    """Split to the number of examples kept of each class, chosen by the examples' own
    keys: the same ones on every machine."""


class Task(Section):
    """What the models learn."""

    type: Literal["single-label"] = "single-label"
    data: Data
    labels: list[str] | None = None
    """Label names in the order of the class ids. Default: what the data declare
    (labels.json in the folder, the hub's features), else the sorted names in train."""
    max_length: Annotated[int, Field(ge=8, le=4096)] = 128
    """Longest input in tokens of each model; what is longer is cut."""

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: list[str] | None) -> list[str] | None:
        if labels is not None:
            if len(labels) < 2:
                raise ValueError("needs at least two labels")
            repeated = {label for label in labels if labels.count(label) > 1}
            if repeated:
                raise ValueError(f"label {sorted(repeated)[0]!r} stands twice")
        return labels


# ---------------------------------------------------------------------------------- models


class Teacher(Section):
    """A frozen encoder."""

    model: str
    """Hub id, local folder, or `pkg:PACKAGE/FOLDER` (a folder inside an installed
    package). Weights must be safetensors."""
    revision: str | None = None
    """Commit of a hub model."""


class Student(Section):
    """The encoder that is trained and shipped."""

    model: str
    """Reference as for a teacher: the weights it starts from."""
    revision: str | None = None
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Layers of `model` that it keeps, counted from 0, e.g. [0, 2, 4, 7, 9, 11]. Default:
    all."""


# ---------------------------------------------------------------------------------- phases


class Training(Section):
    """How a phase trains. The recipe's `training` section sets it for all phases; a phase
    may differ."""

    epochs: Count = 3
    batch_size: Count = 32
    """Examples per optimizer step, all ranks and micro-steps together."""
    micro_batch_size: Count | None = None
    """Examples per rank and forward pass. Default: batch_size divided by the ranks."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    warmup: Share = 0.1
    """Share of all steps in which the learning rate rises linearly; then it falls linearly
    to 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    freeze_embeddings: bool = False
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Dropout of the trained model, everywhere in it. Default: the model's own."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: the epoch with the best validation accuracy, or the last."""
    save_every: Count | None = None
    """Optimizer steps between checkpoints. Default: one at the end of each epoch."""


class Focus(Section):
    """Makes an expert: all examples of some classes and a share of the others."""

    classes: list[str]
    share_of_others: Share = 0.0


class FineTune(Training):
    """Train models on labels."""

    kind: Literal["fine-tune"] = "fine-tune"
    name: Name | None = None
    models: list[Name]
    """Teachers' names or `student`; one after the other with the same settings."""
    split: Name = "train"
    focus: Focus | None = None
    per_class: Count | None = None
    """Examples of each class to train on. Default: all."""
    save_as: Name | None = None
    """Name of the trained model. Default: the model's own name, which then means the
    trained one in later phases."""

    @field_validator("models", mode="before")
    @classmethod
    def _one_or_many(cls, models: Any) -> Any:
        return [models] if isinstance(models, str) else models

    @model_validator(mode="after")
    def _one_name_one_model(self) -> FineTune:
        if self.save_as is not None and len(self.models) > 1:
            raise ValueError("`save_as` names one model, and `models` lists several")
        return self

    @property
    def outputs(self) -> list[str]:
        return [self.save_as] if self.save_as else list(self.models)


class Expertise(Section):
    """Measure each teacher's accuracy per class on a split: the expertise table."""

    kind: Literal["expertise"] = "expertise"
    name: Name | None = None
    split: Name = "validation"


class Cache(Section):
    """Run the teachers once over splits and keep what they say."""

    kind: Literal["cache"] = "cache"
    name: Name | None = None
    splits: list[Name]
    dtype: Literal["float32", "float16"] = "float16"
    batch_size: Count = 64
    """Examples per rank and teacher call."""

    @field_validator("splits", mode="before")
    @classmethod
    def _one_or_many(cls, splits: Any) -> Any:
        return [splits] if isinstance(splits, str) else splits


class Routing(Section):
    """Which teacher an example follows."""

    policy: Literal["average", "expertise", "random", "best", "ca-mkd", "mt-bert"]
    conflict: Literal["best-teacher", "best-expert"] = "best-teacher"
    """For `expertise`, when several teachers (or none) predict a class they are best at:
    follow the most accurate teacher of all (sections 4.6.1 and 4.7 of the thesis) or the
    more accurate of those in conflict (its section 1.3)."""
    mix: Literal["logits", "probabilities", "losses"] | None = None
    """What the weights mix. Default: logits for average, losses for ca-mkd and mt-bert."""

    @property
    def needs_labels(self) -> bool:
        return self.policy in ("ca-mkd", "mt-bert")

    @property
    def needs_expertise(self) -> bool:
        return self.policy in ("expertise", "best")


class CrossEntropyLoss(Section):
    """Cross-entropy between the student and the label, on labelled rows."""

    weight: Annotated[float, Field(gt=0)] = 1.0


class KLLoss(Section):
    """T^2 * KL(teacher || student) at temperature T, against the routed target."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 1.0
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    """Hinge per row: max(weight * T^2 * KL - tolerance, 0)."""


class LogitMSELoss(Section):
    """Mean squared error between student and routed teacher logits."""

    weight: Annotated[float, Field(gt=0)] = 1.0


class HiddenMSELoss(Section):
    """Sum over teachers of MSE(H_t, W_t H_s) on each row's last state; W_t is trained
    (MT-BERT's hidden loss)."""

    weight: Annotated[float, Field(gt=0)] = 1.0


class Losses(Section):
    """Weighted terms; the phase's loss is their sum."""

    cross_entropy: CrossEntropyLoss | None = None
    kl: KLLoss | None = None
    logit_mse: LogitMSELoss | None = None
    hidden_mse: HiddenMSELoss | None = None

    @model_validator(mode="after")
    def _at_least_one(self) -> Losses:
        if not self.terms():
            raise ValueError("needs at least one term, e.g. kl: {temperature: 2.0}")
        return self

    def terms(self) -> dict[str, Section]:
        """The terms that are set, by name."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if getattr(self, name)
        }


class Distil(Training):
    """Train a student on what the teachers say; with several routings, one student each."""

    kind: Literal["distil"] = "distil"
    name: Name | None = None
    split: Name = "train"
    start: Name = "student"
    """The model it starts from: `student` or the name of an earlier trained model."""
    teachers: Literal["live", "cached"] = "live"
    """Teachers in the engine, or their words from an earlier cache phase."""
    routing: list[Routing] = [Routing(policy="average")]
    losses: Losses
    save_as: Name | None = None
    """Name of the student. Default: `student`, or with several routings the policy's."""

    @field_validator("routing", mode="before")
    @classmethod
    def _one_or_many(cls, routing: Any) -> Any:
        many = routing if isinstance(routing, list) else [routing]
        return [{"policy": item} if isinstance(item, str) else item for item in many]

    @model_validator(mode="after")
    def _one_student_per_policy(self) -> Distil:
        if len(self.routing) > 1 and self.save_as is not None:
            raise ValueError("`save_as` names one student, and `routing` lists several")
        policies = [routing.policy for routing in self.routing]
        if len(set(policies)) < len(policies):
            raise ValueError("`routing` lists a policy twice; use two distil phases with `save_as`")
        if not policies:
            raise ValueError("`routing` needs a policy, e.g. average")
        return self

    @property
    def outputs(self) -> list[str]:
        if len(self.routing) == 1:
            return [self.save_as or "student"]
        return [routing.policy for routing in self.routing]


class Evaluate(Section):
    """Accuracy of every model on a split, overall and per class."""

    kind: Literal["evaluate"] = "evaluate"
    name: Name | None = None
    split: Name = "test"
    batch_size: Count = 64
    """Examples per rank and forward pass."""


Phase = Annotated[
    Annotated[FineTune, Tag("fine-tune")]
    | Annotated[Expertise, Tag("expertise")]
    | Annotated[Cache, Tag("cache")]
    | Annotated[Distil, Tag("distil")]
    | Annotated[Evaluate, Tag("evaluate")],
    Discriminator("kind"),
]


# ---------------------------------------------------------------------------------- recipe


class Logging(Section):
    """Where events go beside the console and metrics.jsonl."""

    every: Count = 10
    """Optimizer steps between two events."""
    wandb: str | None = None
    """Project of Weights & Biases; WANDB_MODE=offline keeps it local."""
    tensorboard: bool = False
    """Write TensorBoard files to the run's folder."""


class Recipe(Section):
    """One run: task, teachers, student, phases."""

    name: Name
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    task: Task
    teachers: dict[Name, Teacher] = {}
    student: Student
    training: Training = Training()
    """Settings that every training phase starts from."""
    phases: Annotated[list[Phase], Field(min_length=1)]
    deepspeed: str = "zero1_fp32"
    """A config of ds_configs/deepspeed by name, or the path of a DeepSpeed JSON file."""
    student_resident: bool = True
    """With ZeRO stage 3: keep the student whole on each rank while teachers are sharded."""
    models_folder: str | None = None
    """Folder with local copies of hub models: org/name is looked for as FOLDER/org/name
    and FOLDER/name."""
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _spread_training(cls, data: Any) -> Any:
        """A phase is written {kind: {...}}; training phases start from `training`."""
        if not isinstance(data, dict) or not isinstance(data.get("phases"), list):
            return data
        training = data.get("training")
        shared = training if isinstance(training, dict) else {}
        phases = []
        for phase in data["phases"]:
            if isinstance(phase, str):
                phase = {phase: {}}
            if not (isinstance(phase, dict) and len(phase) == 1):
                raise ValueError(
                    "each phase is one key with its settings, e.g. - evaluate: {split: test}"
                )
            [(kind, body)] = phase.items()
            if body is None:
                body = {}
            if not isinstance(body, dict):
                raise ValueError(f"phase {kind!r} needs settings as key: value, got {body!r}")
            start = shared if kind in ("fine-tune", "distil") else {}
            phases.append({**start, **body, "kind": kind})
        return {**data, "phases": phases}

    @model_serializer(mode="wrap")
    def _as_written(self, handler: Any) -> dict[str, Any]:
        data = handler(self)
        data["phases"] = [
            {phase["kind"]: {key: value for key, value in phase.items() if key != "kind"}}
            for phase in data["phases"]
        ]
        return data

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

    def trained_models(self) -> Iterator[tuple[int, str]]:
        """(phase number, name) of each model that a phase trains, in order."""
        for number, phase in enumerate(self.phases):
            if isinstance(phase, FineTune | Distil):
                for output in phase.outputs:
                    yield number, output
