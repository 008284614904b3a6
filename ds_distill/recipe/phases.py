"""The phases of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from ds_distill.errors import Mistake
from ds_distill.recipe.codecs import Codec, Compact
from ds_distill.recipe.context import Context
from ds_distill.recipe.part import Needs, Part, a_key_each, names_alone
from ds_distill.recipe.phase import (
    PHASES,
    FollowingPhase,
    PhaseSettings,
    TrainingPhase,
)
from ds_distill.recipe.policies import Average, Policy, Routing
from ds_distill.recipe.section import MAY_CHANGE, Count, Name, Section, Several, Share, keyed
from ds_distill.recipe.tasks import TaskSettings
from ds_distill.recipe.terms import (
    Losses,
    SoftenedTerm,
    losses_of,
)
from ds_distill.recipe.text import one_key
from ds_distill.recipe.training import Training

__all__ = [
    "PHASES",
    "Cache",
    "Distil",
    "Evaluate",
    "ExpandVocabulary",
    "Expertise",
    "FineTune",
    "Focus",
    "FollowingPhase",
    "Phase",
    "PhaseSettings",
    "TrainingPhase",
]


class Focus(Section):
    """Makes an expert: all examples of some classes and a share of the others."""

    classes: list[str]
    """The classes of which it sees all examples."""
    share_of_others: Share = 0.0
    """Share of the examples of the other classes that it sees."""


class FineTune(TrainingPhase):
    """Train models without teachers."""

    runs, makes = "ds_distill.phases.fine_tune:fine_tune", "control"

    kind: Literal["fine-tune"] = "fine-tune"
    models: Several[Name]
    """Teachers' names or `student`; one after the other with the same settings."""
    shared_head: bool = False
    """Train the teachers in `models` together, in one engine, each on its own text but all through
    one pooling layer and one prediction layer, so that their states come to mean the same (MT-BERT,
    Wu et al. 2021). The loss is the sum of theirs."""
    focus: Focus | None = None
    losses: Losses = Field(default_factory=lambda: losses_of({"cross_entropy": {}}))
    """Default: cross_entropy, and mse where labels are numbers."""
    per_class: Count | None = None
    """Examples of each class to train on. Default: all."""
    save_as: Name | None = None
    """Name of the trained model. Default: the model's own name, which then means the
    trained one in later phases."""

    @model_validator(mode="after")
    def _one_name_one_model(self) -> FineTune:
        if self.save_as is not None and len(self.models) > 1:
            raise ValueError("`save_as` names one model, and `models` lists several")
        return self

    def of_task(self, task: TaskSettings) -> FineTune:
        if "losses" in self.model_fields_set:
            return self
        return self.model_copy(update={"losses": losses_of({task.label_term: {}})})

    @property
    def starts(self) -> list[str]:
        return list(self.models)

    @property
    def outputs(self) -> list[str]:
        return [self.save_as] if self.save_as else list(self.models)

    @property
    def trainings(self) -> list[list[str]]:
        return [self.outputs] if self.shared_head else super().trainings

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, True)]

    def lists(self) -> dict[str, list[str]]:
        focus = {"focus.classes": self.focus.classes} if self.focus is not None else {}
        return {"models": self.models, **focus}

    def labels_named(self) -> dict[str, list[str]]:
        focus = {"focus.classes": self.focus.classes} if self.focus is not None else {}
        return {**focus, **super().labels_named()}

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        yield from super().mistakes(context)
        for model in self.models:
            if model not in context.models:
                yield Mistake(
                    f"{context.location}.models",
                    f"no model {model!r} here. There are: {', '.join(sorted(context.models))}.",
                )
        yield from self._taught_control(context)
        if self.shared_head:
            yield from self._shared_head_mistakes(context)
        task = context.task
        if task.predicts not in ("class", "labels"):
            has = "has a class for each word" if task.predicts == "tag" else "has no classes"
            for key in ("focus", "per_class"):
                if getattr(self, key):
                    yield Mistake(
                        f"{context.location}.{key}",
                        "chooses examples by class, and "
                        f"{task.location}.type={task.type} {has}. Take the key out.",
                    )
        elif self.per_class is not None and task.predicts == "labels":
            limit = f"{task.location}.data.limit.{self.split}={self.per_class}"
            yield Mistake(
                f"{context.location}.per_class",
                f"caps the examples of each class, and with "
                f"{task.location}.type={task.type} an example has any number of them. Set {limit} "
                "instead, or take the key out.",
            )

    def _taught_control(self, context: Context) -> Iterator[Mistake]:
        """A control that would go on from the student that it is to be compared with."""
        start = context.model("student")
        taught = start.distilled and start.head == context.task_name
        if taught and self.models == ["student"] and self.save_as is not None:
            assert start.made_by is not None
            by = f"phases.{context.phase_names[start.made_by]}"
            yield Mistake(
                f"{context.location}.models",
                f"`student` is by now the one that {by} has trained, "
                f"and {self.save_as!r} would go on from it. For a student without teachers put "
                f"this phase before {by}; to go on from it name it there with save_as, and here "
                "with models.",
            )

    def _shared_head_mistakes(self, context: Context) -> Iterator[Mistake]:
        location, task = context.location, context.task
        others = [name for name in self.models if name not in context.given]
        if len(self.models) == 1:
            yield Mistake(
                f"{location}.shared_head=true",
                f"`models` names {self.models[0]} alone, which shares "
                "its head with nobody. Name two teachers or more, or take shared_head out.",
            )
        elif others and others[0] in context.models:
            yield Mistake(
                f"{location}.models",
                f"{others[0]!r} is none of the recipe's teachers, and with "
                "shared_head=true teachers are trained together. There are: "
                f"{', '.join(context.given) or 'none'}.",
            )
        if task.heads[0] != "ForSequenceClassification":
            yield Mistake(
                f"{location}.shared_head=true",
                f"shares the layers that classify a text, and "
                f"{task.location}.type={task.type} has no such layers. Take shared_head out.",
            )


class ExpandVocabulary(PhaseSettings):
    """Add the words of a text to the student's WordPiece vocabulary, and rows for them to its
    embeddings and its output. Tokens that it has keep their ids."""

    runs, makes = "ds_distill.phases.expand_vocabulary:expand_vocabulary", "start"

    kind: Literal["expand-vocabulary"] = "expand-vocabulary"
    split: Name = "train"
    """The split whose words are added."""
    size: Count
    """Tokens and rows in all, e.g. 60000; fewer where the text has no more words."""
    share: Share | None = None
    """Of the text's words, as often as they stand there, the share that shall be one token each: no
    more tokens are added than that takes, and at most `size`. None: as many as `size` has room for.
    """
    embeddings: Literal["pieces", "random"] = "pieces"
    """How new rows begin: `pieces`, as the mean of the rows of the word's old pieces; `random`, as
    transformers begins."""
    start: Name = "student"
    """The model whose vocabulary grows: `student` or the name of an earlier trained model."""
    save_as: Name | None = None
    """Name of the model. Default: `student`."""

    @property
    def starts(self) -> list[str]:
        return [self.start]

    @property
    def outputs(self) -> list[str]:
        return [self.save_as or "student"]

    @property
    def learns_from(self) -> list[str]:
        return [self.split]

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, False)]

    @property
    def vocabulary(self) -> int:
        return self.size

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """A task without a vocabulary to predict, and a start that is not there."""
        if context.task.predicts != "token":
            yield Mistake(
                f"{context.location}",
                f"adds rows to what a masked-lm predicts, and the task's type "
                f"is {context.task.type}. Name a masked-lm task (task: NAME), or take the phase "
                "out.",
            )
        if self.start not in context.models - set(context.given):
            there = context.models - set(context.given)
            yield Mistake(
                f"{context.location}.start",
                f"no student {self.start!r} before this phase. There "
                f"are: {', '.join(sorted(there))}.",
            )


class Expertise(PhaseSettings):
    """Learn from a labelled split what each teacher knows: accuracy per class, calibration,
    a gate. Compare all routing policies on it and choose one."""

    runs, makes = "ds_distill.phases.expertise:expertise", "expertise"
    needs = Needs(teachers=1, classes=True)

    kind: Literal["expertise"] = "expertise"
    split: Name = "validation"
    """The labelled split. Of `validation` it reads one half: the other chooses epochs and the
    student to ship."""
    states: bool = True
    """Let the gate read the teachers' last states beside their logits. A gate in a cached
    distillation then needs them in the cache (`hidden: [-1]`)."""
    leave_out: Literal["unqualified"] | None = None
    """`unqualified`: the phases after it, of the same task, do without a teacher that is best at
    no class here (thesis 4.6) and does not know one alone; evaluations show it all the same.
    Default: nobody leaves."""

    show_examples: Annotated[int, Field(ge=0, le=100)] = 0
    """How many texts the report shows on which teachers disagree, with what the chosen policy made
    of them, or where that is the average the first other one that a student is to follow; where
    each example has one class. Default: none, because texts may be private."""

    @property
    def learns_from(self) -> list[str]:
        return [self.split]

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, True)]

    @property
    def runs_teachers(self) -> bool:
        return True

    @property
    def leaves_out_teachers(self) -> bool:
        return self.leave_out is not None


class Cache(FollowingPhase):
    """Run the teachers once over splits and store their signals."""

    runs, makes = "ds_distill.phases.cache:cache", "cache"
    needs = Needs(teachers=1)

    kind: Literal["cache"] = "cache"
    splits: Several[Name]
    """The splits whose examples the teachers are run on."""
    folder: str | None = None
    """Where the cache lies, for runs that share one: what it lacks is added, and teachers are not
    run again on what it holds. Default: in the run's folder."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    """Of logits and hidden states as they are stored."""
    hidden: list[int] = Field(default_factory=list)
    """Layers whose states are stored beside the logits, for terms and policies that read them:
    -1 is the last one. Of a sequence-level task it is the first token's state, or the mean of all
    tokens' where the model's head reads that."""
    codec: Codec = Compact()
    """For masked-LM teachers."""
    only_if_read: bool = False
    """Skip the phase where no later distil phase reads a split of it: `teachers` there then decides
    alone whether there is a cache. An expertise phase runs the teachers where there is none."""
    batch_size: Annotated[Count | None, MAY_CHANGE] = None
    """Examples per rank and teacher call. Default: 64, or of a teacher that runs without
    padding as many as have 32,768 tokens together."""

    def is_left_out(self, later: Iterable[PhaseSettings]) -> bool:
        """Whether the phase does nothing, given those after it."""
        return self.only_if_read and not any(other.cached_split in self.splits for other in later)

    @property
    def shared(self) -> Path | None:
        """The folder that runs share; None where the run has its own."""
        return None if self.folder is None else Path(self.folder).expanduser()

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(split, False) for split in self.splits]

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield "codec", self.codec

    def lists(self) -> dict[str, list[str]]:
        return {"splits": self.splits, **super().lists()}

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        yield from super().mistakes(context)
        why = context.task.not_cacheable()
        if why is not None:
            yield Mistake(f"{context.location}", f"{why}")


class Distil(TrainingPhase, FollowingPhase):
    """Train a student on teacher signals; with several routings, one student each."""

    runs, makes = "ds_distill.phases.distil:distil", "student"
    needs = Needs(teachers=1)

    kind: Literal["distil"] = "distil"
    start: Name = "student"
    """The model it starts from: `student` or the name of an earlier trained model."""
    teachers: Literal["live", "cached"] = "live"
    """Teachers in the engine, or their signals from an earlier cache phase."""
    routing: Several[Policy] = Field(default_factory=lambda: list[Routing]([Average()]))
    """Which teacher an example follows: a policy's name, or its settings, or a list of them."""
    save_as: Name | None = None
    """Name of the student. Default: `student`, or with several routings the policy's."""

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
    def temperature(self) -> float:
        """Of the distributions that the terms compare: policies mix probabilities at it."""
        softened = (term for term in self.losses.values() if isinstance(term, SoftenedTerm))
        return next((term.temperature for term in softened), 1.0)

    @property
    def starts(self) -> list[str]:
        return [self.start]

    @property
    def outputs(self) -> list[str]:
        if len(self.routing) == 1:
            return [self.save_as or "student"]
        return [routing.policy for routing in self.routing]

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, any(part.all_needs().labels for _, part in self.parts()))]

    @property
    def cached_split(self) -> str | None:
        return self.split if self.teachers == "cached" else None

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from super().parts()
        for routing in self.routing:
            yield "routing", routing

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """A start or a teacher that is not there, and what is wrong with any training."""
        yield from super().mistakes(context)
        if self.start not in context.models:
            yield Mistake(
                f"{context.location}.start",
                f"no model {self.start!r} before this phase. There are: "
                f"{', '.join(sorted(context.models))}.",
            )


START = "start"
"""Name and role of the student before any training."""


class Evaluate(PhaseSettings):
    """All metrics of every model on a split: of classifiers also per class, of masked-LMs on masked
    tokens, the same ones for all."""

    runs, makes = "ds_distill.phases.evaluate:evaluate", "evaluation"

    kind: Literal["evaluate"] = "evaluate"
    split: Name = "test"
    """The split on which the models are evaluated."""
    start: bool = False
    """Evaluate the student before any training as well, under the name `start`: of each student it
    then tells which part of the way from there to a teacher it has gone (`gap_closed`)."""
    batch_size: Annotated[Count, MAY_CHANGE] = 64
    """Examples per rank and forward pass."""

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, True)]

    @property
    def runs_teachers(self) -> bool:
        return True

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """A model that has the name of the student before training."""
        if self.start and START in context.models:
            yield Mistake(
                f"{context.location}.start",
                f"a model is called {START!r}, which is the name of the "
                "student before any training here. Rename that model.",
            )


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
