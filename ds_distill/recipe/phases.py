"""The phases of a recipe: what the settings of all have, of those that train, and each kind's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ds_distill.errors import Mistake
from ds_distill.recipe.codecs import Codec, Compact
from ds_distill.recipe.context import Context
from ds_distill.recipe.part import Needs, Part
from ds_distill.recipe.policies import Average, Policy, Routing
from ds_distill.recipe.section import MAY_CHANGE, Count, Name, Section, Several, Share
from ds_distill.recipe.tasks import TaskSettings
from ds_distill.recipe.terms import Losses, SoftenedTerm, losses_of
from ds_distill.recipe.training import Training

PHASES: dict[str, type[PhaseSettings]] = {}

Makes = Literal["student", "control", "start", "cache", "expertise", "evaluation"]


class PhaseSettings(Part):
    """Settings of a phase. What other code asks of a phase it asks here, and not of its kind. It
    runs a function (settings, number, name, run) -> record: JSON values."""

    kind_of_part, key, table = "phase", "kind", PHASES

    makes: ClassVar[Makes | None] = None
    """What it leaves for later phases and for the report: a `student` learns from teachers, a
    `control` (or a teacher) from labels, and a `start` from nothing so far; all are `outputs`."""

    reads_labels: ClassVar[bool] = False
    """Whether it needs the labels of its `split`."""
    runs_teachers: ClassVar[bool] = False
    """Whether it runs the recipe's teachers as they are."""

    kind: str
    name: Name | None = None
    """Name of the phase, in the run's folder and in overrides. Default: its kind, numbered where
    that repeats."""
    task: Name | None = None
    """The task that it works on, by its name in `tasks`. Default: the only one."""

    def of_task(self, task: TaskSettings) -> Self:
        """The settings with what is by default otherwise in another kind of task; the recipe says
        of which kind theirs is, once it has been read."""
        return self

    @property
    def starts(self) -> list[str]:
        """Names of the models that it starts from: teachers', `student`, or those of models that
        earlier phases trained."""
        return []

    @property
    def outputs(self) -> list[str]:
        """Names of the models that it trains."""
        return []

    def start_of(self, output: str) -> str:
        """The model that one of its outputs starts from."""
        each = len(self.starts) == len(self.outputs)
        return self.starts[self.outputs.index(output) if each else 0]

    @property
    def reads(self) -> list[tuple[str, bool]]:
        """Splits that it reads, and of each whether it needs labels: its `split`, if it has one."""
        split = getattr(self, "split", None)
        return [] if split is None else [(split, self.reads_labels)]

    @property
    def learns_from(self) -> list[str]:
        """Splits that it trains on or fits to: figures on them say nothing of its outputs."""
        if self.makes in (None, "cache", "evaluation"):
            return []
        return [split for split, _ in self.reads]

    @property
    def vocabulary(self) -> int | None:
        """Tokens of its outputs, where these have more than what they start from."""
        return None

    @property
    def followed(self) -> list[str] | None:
        """Names of the models that teach in it; None for the recipe's teachers."""
        return None

    @property
    def leaves_out_teachers(self) -> bool:
        """Whether its record names the only `teachers` that the phases after it have."""
        return False

    @property
    def cached_split(self) -> str | None:
        """The split whose teacher signals it reads from an earlier cache phase, if it does."""
        return None

    def parts(self) -> Iterator[tuple[str, Part]]:
        """(key within the phase, settings) of the parts that it uses, such as its terms."""
        yield from ()

    def lists(self) -> dict[str, list[str]]:
        """By key: lists that must hold something, and nothing twice."""
        return {}

    def labels_named(self) -> dict[str, list[str]]:
        """By key: labels that must be the task's."""
        return {}


class FollowingPhase(PhaseSettings):
    """Settings of a phase that can have other teachers than the recipe's."""

    runs_teachers = True

    follow: Several[Name] | None = None
    """The models that teach in it, in this order: teachers' names, or those of models that earlier
    phases trained, as they are by then. Default: the recipe's teachers."""

    @property
    def followed(self) -> list[str] | None:
        return self.follow

    def lists(self) -> dict[str, list[str]]:
        return {**super().lists(), **({} if self.follow is None else {"follow": self.follow})}

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """Models to follow that are not there, or cannot teach."""
        yield from super().mistakes(context)
        if "student" in (follow := self.follow or []):
            yield Mistake(
                f"{context.location}.follow",
                "`student` is what is trained here. Save the model that is to teach under a name "
                "of its own (save_as), and follow that.",
            )
        named = [name for name in follow if name != "student"]
        yield from context.unknown("follow", named, but=["student"])


class TrainingPhase(Training, PhaseSettings):
    """Settings of a phase that trains models on one split."""

    split: Name = "train"
    """The split that it trains on; its labels are read where something needs them."""
    losses: Losses
    """Weighted terms, by name; the phase's loss is their sum."""

    @property
    def trainings(self) -> list[list[str]]:
        """Its outputs, those together that one engine trains."""
        return [[output] for output in self.outputs]

    def parts(self) -> Iterator[tuple[str, Part]]:
        for name, term in self.losses.items():
            yield f"losses.{name}", term

    def labels_named(self) -> dict[str, list[str]]:
        return {
            f"losses.{name}.{key}": named
            for name, settings in self.losses.items()
            for key, named in settings.labels_named().items()
        }

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """Steps without a term, an epoch that could be kept from before a term starts, and patience
        with weights that are not the best."""
        yield from self._training_mistakes(context)
        yield from super().mistakes(context)

    def _training_mistakes(self, context: Context) -> Iterator[Mistake]:
        location, losses = context.location, self.losses
        if self.patience is not None and self.keep != "best":
            yield Mistake(
                f"{location}.patience={self.patience}",
                f"training would end after epochs without a better score, and keep={self.keep} "
                f"keep the last of them. Set {location}.keep=best, or take patience out.",
            )
        late = {name: term.start for name, term in losses.items() if term.start > 0}
        if late and self.keep == "best":
            name = max(late, key=lambda name: late[name])
            yield Mistake(
                f"{location}.losses.{name}.from={late[name]:g}",
                "keep=best could keep an epoch from before the term is active. Set "
                f"{location}.keep=last.",
            )
        moving = sorted((one.start, one.until) for one in losses.values() if one.moves_student)
        if not moving:
            yield Mistake(
                f"{location}.losses",
                f"{', '.join(losses)} has no gradient for the student, which would learn nothing. "
                "Add a term that has one, such as cross_entropy.",
            )
            return
        covered = 0.0
        for start, until in [*moving, (1.0, 1.0)]:
            if start > covered:
                yield Mistake(
                    f"{location}.losses",
                    f"no term is active from {covered:g} to {start:g} of the phase's steps. Let "
                    "`from` and `until` of the terms meet.",
                )
                return
            covered = max(covered, until)


class Focus(Section):
    """Makes an expert: all examples of some classes and a share of the others."""

    classes: list[str]
    """The classes of which it sees all examples."""
    share_of_others: Share = 0.0
    """Share of the examples of the other classes that it sees."""


class FineTune(TrainingPhase):
    """Train models without teachers."""

    runs, makes = "ds_distill.phases.fine_tune:fine_tune", "control"
    reads_labels = True

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

    def lists(self) -> dict[str, list[str]]:
        return {"models": self.models, **self._focused()}

    def labels_named(self) -> dict[str, list[str]]:
        return {**self._focused(), **super().labels_named()}

    def _focused(self) -> dict[str, list[str]]:
        return {} if self.focus is None else {"focus.classes": self.focus.classes}

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        yield from super().mistakes(context)
        yield from context.unknown("models", self.models)
        yield from self._taught_control(context)
        if self.shared_head:
            yield from self._shared_head_mistakes(context)
        task = context.task
        if task.of_words or not task.has_classes:
            has = "has a class for each word" if task.of_words else "has no classes"
            for key in ("focus", "per_class"):
                if getattr(self, key):
                    yield Mistake(
                        f"{context.location}.{key}",
                        "chooses examples by class, and "
                        f"{task.location}.type={task.type} {has}. Take the key out.",
                    )
        elif self.per_class is not None and task.many_labels:
            limit = f"{task.location}.data.limit.{self.split}={self.per_class}"
            yield Mistake(
                f"{context.location}.per_class",
                f"caps the examples of each class, and with {task.location}.type={task.type} an "
                f"example has any number of them. Set {limit} instead, or take the key out.",
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
                f"`student` is by now the one that {by} has trained, and {self.save_as!r} would go "
                f"on from it. For a student without teachers put this phase before {by}; to go on "
                "from it name it there with save_as, and here with models.",
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
                f"{others[0]!r} is none of the recipe's teachers, and with shared_head=true "
                f"teachers are trained together. There are: {', '.join(context.given) or 'none'}.",
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
    def vocabulary(self) -> int:
        return self.size

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """A task without a vocabulary to predict, and a start that is not there."""
        if not context.task.of_vocabulary:
            yield Mistake(
                f"{context.location}",
                "adds rows to what a masked-lm predicts, and the task's type is "
                f"{context.task.type}. Name a masked-lm task (task: NAME), or take the phase out.",
            )
        yield from context.unknown("start", self.starts, but=context.given)


class Expertise(PhaseSettings):
    """Learn from a labelled split what each teacher knows: accuracy per class, calibration,
    a gate. Compare all routing policies on it and choose one."""

    runs, makes = "ds_distill.phases.expertise:expertise", "expertise"
    reads_labels, runs_teachers = True, True
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

    def example_bytes(
        self, task: TaskSettings, width: int, classes: int | None, vocabulary: int, length: float
    ) -> float:
        """About how many bytes a teacher's signals on one example take, for the plan.

        width: of its states. classes: None over a vocabulary. length: tokens of the example.
        """
        size = 4 if self.dtype == "float32" else 2
        rows = 1.0 if task.row_share is None else task.row_share * length * task.variants
        if task.ragged:
            # Of each window a start and an end, over as many tokens as it may have.
            rows, row = 2.0, float(task.max_length * size)
        elif classes is not None:
            row = float(classes * size)
        else:
            row = self.codec.row_bytes(vocabulary, size)
        return (row + len(self.hidden) * width * size) * rows

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
    routing: Annotated[Several[Policy], Field(min_length=1)] = Field(
        default_factory=lambda: list[Routing]([Average()])
    )
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
        yield from context.unknown("start", self.starts)


START = "start"
"""Name and role of the student before any training."""


class Evaluate(PhaseSettings):
    """All metrics of every model on a split: of classifiers also per class, of masked-LMs on masked
    tokens, the same ones for all."""

    runs, makes = "ds_distill.phases.evaluate:evaluate", "evaluation"
    reads_labels, runs_teachers = True, True

    kind: Literal["evaluate"] = "evaluate"
    split: Name = "test"
    """The split on which the models are evaluated."""
    start: bool = False
    """Evaluate the student before any training as well, under the name `start`: of each student it
    then tells which part of the way from there to a teacher it has gone (`gap_closed`)."""
    batch_size: Annotated[Count, MAY_CHANGE] = 64
    """Examples per rank and forward pass."""

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """A model that has the name of the student before training."""
        if self.start and START in context.models:
            yield Mistake(
                f"{context.location}.start",
                f"a model is called {START!r}, which is the name of the "
                "student before any training here. Rename that model.",
            )


def training_name(outputs: Iterable[str]) -> str:
    """The name of the training of models: of one its own, of several in one engine `A+B`."""
    return "+".join(outputs)
