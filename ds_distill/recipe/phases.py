"""What a recipe may say of its phases: training, routing, losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ds_distill.recipe.section import Count, Name, Section, Share


class Training(Section):
    """How a phase trains. The recipe's `training` section sets it for all phases; a phase
    may differ."""

    epochs: Count = 3
    """Passes over the split."""
    batch_size: Count = 32
    """Examples per optimizer step, all ranks and micro-steps together."""
    micro_batch_size: Count | None = None
    """Examples per rank and forward pass. Default: batch_size divided by the ranks."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    """The highest one, of AdamW."""
    warmup: Share = 0.1
    """Share of all steps in which the learning rate rises linearly; then it falls linearly
    to 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Of AdamW, on matrices alone."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients whose norm is larger are scaled down to it."""
    freeze_embeddings: bool = False
    """Do not train the embeddings of words, positions and types, and their layer norm."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Dropout of the trained model, everywhere in it. Default: the model's own."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: the epoch with the best validation accuracy, or the last."""
    save_every: Count | None = None
    """Optimizer steps between checkpoints. Default: one at the end of each epoch."""


class Focus(Section):
    """Makes an expert: all examples of some classes and a share of the others."""

    classes: list[str]
    """The classes of which it sees all examples."""
    share_of_others: Share = 0.0
    """Share of the examples of the other classes that it sees."""


class FineTune(Training):
    """Train models on labels."""

    kind: Literal["fine-tune"] = "fine-tune"
    name: Name | None = None
    """Name of the phase, in the run's folder and in overrides. Default: its kind, numbered where
    that repeats."""
    models: list[Name]
    """Teachers' names or `student`; one after the other with the same settings."""
    split: Name = "train"
    """The split that it trains on."""
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
    """Learn from a labelled split what each teacher knows: accuracy per class, calibration,
    confusions, a gate. Compare all routing policies on it and choose one."""

    kind: Literal["expertise"] = "expertise"
    name: Name | None = None
    """Name of the phase, in the run's folder and in overrides. Default: its kind, numbered where
    that repeats."""
    split: Name = "validation"
    """The labelled split. Of `validation` it reads one half: the other chooses epochs and the
    student to ship."""
    states: bool = True
    """Let the gate read the teachers' last states beside their logits. A gate in a cached
    distillation then needs them in the cache (`hidden: [-1]`)."""


class Codec(Section):
    """How a cache keeps distributions over a vocabulary. `ds-distill cache compare` measures
    the choices on your own teacher."""

    name: Literal["compact", "topk", "dense"] = "compact"
    """`compact`: the entries that a row needs, and how its tail lies; `topk`: a number of its
    likeliest entries and the tail's mass, decoded fast, but of a flat teacher much is lost
    (docs/codecs.md); `dense`: all logits, in the phase's dtype."""
    threshold: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """The probability from which entries are kept, for `compact`."""
    entries: Count = 64
    """Of a row, for `topk`."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the distributions: that of the kl term that reads them."""


class Cache(Section):
    """Run the teachers once over splits and keep what they say."""

    kind: Literal["cache"] = "cache"
    name: Name | None = None
    """Name of the phase, in the run's folder and in overrides. Default: its kind, numbered where
    that repeats."""
    splits: list[Name]
    """The splits whose examples the teachers are run on."""
    folder: str | None = None
    """Where the cache lies, for runs that share one: what it lacks is added, what it holds is
    not asked again. Default: in the run's folder."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    """Of logits and hidden states as they are stored."""
    hidden: list[int] = Field(default_factory=list)
    """Layers whose states are kept beside the logits, for terms and policies that read them:
    -1 is the last one. Of a sequence-level task it is the first token's state."""
    codec: Codec = Codec()
    """For masked-LM teachers."""
    batch_size: Count | None = None
    """Examples per rank and teacher call. Default: 64, or of a teacher that is asked without
    padding as many as have 32,768 tokens together."""

    @field_validator("splits", mode="before")
    @classmethod
    def _one_or_many(cls, splits: Any) -> Any:
        return [splits] if isinstance(splits, str) else splits


class Routing(Section):
    """Which teacher an example follows."""

    policy: Literal[
        "average",
        "random",
        "best",
        "expertise",
        "calibrated",
        "posterior",
        "gate",
        "chosen",
        "ca-mkd",
        "mt-bert",
    ]
    """`chosen` is what the expertise phase found best on its split."""
    conflict: Literal["best-teacher", "best-expert", "most-confident"] = "best-teacher"
    """For `expertise`, when several teachers (or none) predict a class they are best at:
    follow the most accurate teacher of all (sections 4.6.1 and 4.7 of the thesis), the
    more accurate of those in conflict (its section 1.3), or the more confident one, each
    calibrated (ours)."""
    mix: Literal["logits", "probabilities", "losses"] | None = None
    """What the weights mix. Default: probabilities for calibrated, losses for ca-mkd and
    mt-bert, else logits."""

    @model_validator(mode="after")
    def _mix_is_one_the_policy_has(self) -> Routing:
        if self.mix is not None and self.policy in ("posterior", "gate", "chosen"):
            raise ValueError(
                f"`mix` is for policies that weigh the teachers, and {self.policy} is none: "
                "leave it out"
            )
        if self.mix == "losses" and self.policy == "calibrated":
            raise ValueError(
                "calibrated changes probabilities, and mix=losses would not see it: leave "
                "`mix` out, or take the policy average"
            )
        return self

    @property
    def needs_labels(self) -> bool:
        return self.policy in ("ca-mkd", "mt-bert")

    @property
    def needs_expertise(self) -> bool:
        return self.policy in ("best", "expertise", "calibrated", "posterior", "gate", "chosen")

    @property
    def changes_a_single_teacher(self) -> bool:
        """Whether with one teacher the target is not that teacher's word."""
        return self.policy in ("calibrated", "posterior", "gate", "mt-bert")

    @property
    def may_read_states(self) -> bool:
        return self.policy in ("gate", "chosen")


class CrossEntropyLoss(Section):
    """Cross-entropy between the student and the label, on labelled rows. In masked-LM a row is a
    hidden token, and its label the token itself."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the term in the phase's loss."""


class KLLoss(Section):
    """T^2 * KL(teacher || student) at temperature T, against the routed target."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the term in the phase's loss."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """T: logits are divided by it before the softmax."""
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    """Hinge per row: max(weight * T^2 * KL - tolerance, 0)."""


class LogitMSELoss(Section):
    """Mean squared error between student and routed teacher logits."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the term in the phase's loss."""


class HiddenMSELoss(Section):
    """Sum over teachers of MSE(H_t, W_t H_s) on each row's last state; W_t is trained
    (MT-BERT's hidden loss)."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the term in the phase's loss."""


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
    """Name of the phase, in the run's folder and in overrides. Default: its kind, numbered where
    that repeats."""
    split: Name = "train"
    """The split that it trains on; its labels are read by the terms and policies that need them."""
    start: Name = "student"
    """The model it starts from: `student` or the name of an earlier trained model."""
    teachers: Literal["live", "cached"] = "live"
    """Teachers in the engine, or their words from an earlier cache phase."""
    routing: list[Routing] = Field(default_factory=lambda: [Routing(policy="average")])
    """Which teacher each example follows: a policy, by its name or with settings, or a list of them
    for one student each. Default: average."""
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
    """Accuracy of every model on a split, overall and per class; of masked-LMs, accuracy, loss and
    perplexity on hidden tokens, the same ones for all."""

    kind: Literal["evaluate"] = "evaluate"
    name: Name | None = None
    """Name of the phase, in the run's folder and in overrides. Default: its kind, numbered where
    that repeats."""
    split: Name = "test"
    """The split on which the models are evaluated."""
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
