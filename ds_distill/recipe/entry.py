"""What an entry is: all that the schema, `check`, the comparison of policies, the report and the
documents know of a part, in one frozen dataclass. Of a metric, which computes with numpy alone, all
is one class instead (`ds_distill.recipe.metrics`).

An entry names its implementation as `module:name`, which is imported when it runs: nothing in
`ds_distill.parts` imports torch, so that `ds-distill check` answers at once.

Of each kind there is one plain dict, name -> entry: `TASKS`, `PHASES`, `TERMS`, `POLICIES`,
`CODECS`, `METRICS` (by what they are over) and `SOURCES`, each in the module of its kind, beside
the recipe sections of its parts. No other list of names exists. Parts of other packages are added
to the same dicts by `ds_distill.recipe.entry_points`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ds_distill.errors import UserError
from ds_distill.recipe.section import Section

if TYPE_CHECKING:
    from ds_distill.recipe.context import Context

Rule = Callable[[Any, "Context"], Iterator[str]]
"""(the part's settings, what the phase finds) -> what is wrong with them, one message each."""


def imported(reference: str) -> Any:
    """What `module:name` names. Raises ImportError, AttributeError or ValueError."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Needs:
    """What a part cannot do without. `check` refuses a recipe that does not have it."""

    labels: bool = False
    """Of a term or a policy: labelled examples."""
    classes: bool = False
    """A task with classes."""
    distributions: bool = False
    """A task whose models predict distributions, over classes or a vocabulary, and not numbers."""
    numbers: bool = False
    """A task whose labels are numbers."""
    expertise: bool = False
    """What an expertise phase fits. It has classes, so `classes` need not be set."""
    states: tuple[int, ...] = ()
    """Of a term: layers whose hidden states it reads of every teacher, as `Signals.hidden` numbers
    them."""
    every_token: bool = False
    """Of a term: a row for every token of a text, which masked-LM has."""
    fitted_states: bool = False
    """Of a policy: the teachers' last states too, where the expertise phase fitted on them (as the
    gate does). Without it `Asked.states` is empty."""
    logits: bool = False
    """The teachers' logits themselves, where some codecs keep the distributions alone."""
    teacher_ids: bool = False
    """Of a policy: data that name the teacher that an example follows (`columns.teacher`)."""
    live_teachers: bool = False
    """What a teacher computes and a cache does not keep."""
    same_tokens: bool = False
    """That all models split a text into the same tokens: it compares them token by token."""
    teachers: int = 0
    """So many teachers at least."""
    at_most: int | None = None
    """So many teachers at most."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the parts of all kinds have."""

    name: str
    """As recipes and results call it."""
    implementation: str | None
    """`module:name`. None for a part that other code handles (`chosen`, `dense`)."""

    def load(self) -> Any:
        """The implementation. Raises UserError when it cannot be imported."""
        try:
            return imported(self.implementation or "")
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"part {self.name!r}: its implementation {self.implementation!r} cannot be "
                f"imported: {error}. Correct it in the package that the part comes from."
            ) from error


@dataclass(frozen=True, kw_only=True)
class ConfiguredEntry(Entry):
    """A part with a section in the recipe."""

    settings: type[Section]
    """The section. Its docstring and those of its fields are the part's documentation."""
    needs: Needs = Needs()
    """Whatever its settings are."""
    mistakes: Rule | None = None
    """What else can be wrong with the settings. Imports no torch."""

    def needs_of(self, settings: Any) -> Needs:
        """What it needs with these settings."""
        del settings
        return self.needs


Over = Literal["classes", "labels", "words", "characters", "answers", "masked tokens", "numbers"]
"""What a metric is over: the kind of the task's predictions."""


@dataclass(frozen=True, kw_only=True)
class TaskEntry(ConfiguredEntry):
    """A kind of task. `settings` is a `TaskSettings`; the implementation is a
    `ds_distill.tasks.TaskKind`."""

    over: Over
    """What its metrics are over."""
    heads: tuple[str, ...]
    """Endings of the names of transformers' classes that have a head for it, its own first."""
    noun: str
    """What a model with such a head is called."""
    outputs: int | None = None
    """How many outputs the head has, where the task's labels do not say."""
    problem: str | None = None
    """transformers' `problem_type` of a model with such a head, where it has one."""
    other_problems: tuple[str, ...] = ()
    """Others' whose outputs cannot be read as this task's."""
    label_term: str = "cross_entropy"
    """The term by which a model is fine-tuned on labels where the recipe names none."""
    checks_model: str | None = None
    """`module:name` of a function (reference, config, tokenizer) that raises UserError for a model
    that cannot have such a head."""
    pipeline: str
    """The pipeline of transformers that a model of it runs in."""
    imports: str = "pipeline"
    """What of transformers `usage` needs."""
    usage: Callable[[Any, bool], list[str]]
    """(settings, whether its examples are pairs of texts) -> lines of Python that use a student in
    its folder."""


Makes = Literal["student", "control", "start", "cache", "expertise", "evaluation"]


@dataclass(frozen=True, kw_only=True)
class PhaseEntry(ConfiguredEntry):
    """A phase. `settings` is a `PhaseSettings`; the implementation is a function (settings, number,
    name, run) -> record: JSON values."""

    makes: Makes | None = None
    """What it leaves for later phases and for the report: a `student` learns from teachers, a
    `control` (or a teacher) from labels, and a `start` from nothing so far; all are
    `settings.outputs`."""


@dataclass(frozen=True, kw_only=True)
class TermEntry(ConfiguredEntry):
    """A loss term. `settings` is a `TermSettings`; the implementation is a `Term`."""

    moves_student: bool = True
    """Whether it has a gradient for the student. In each step another term must have one, where it
    has none."""
    needs_by: Callable[[Any, Needs], Needs] | None = None
    """(settings, `needs`) -> what it needs with these settings. None: `needs`."""

    def needs_of(self, settings: Any) -> Needs:
        return self.needs if self.needs_by is None else self.needs_by(settings, self.needs)


@dataclass(frozen=True)
class Candidate:
    """A policy with settings under which it is compared before a student is trained."""

    name: str
    """The policy's name, or `NAME, AND HOW`."""
    settings: Section
    meaning: str
    """What it takes as the target: half a line."""
    for_partial: bool = False
    """Whether it is compared only where a teacher knows some of the classes."""


@dataclass(frozen=True, kw_only=True)
class PolicyEntry(ConfiguredEntry):
    """A routing policy. `settings` is a `Routing`; the implementation is a function
    (`ds_distill.routing.Asked`) -> Target."""

    keeps_lone_teacher: bool = False
    """Whether with one teacher the target is that teacher's own logits. The router is left out
    then, and a vocabulary's logits need not be made. False is safe."""
    takes_partial: Literal["target", "losses"] | None = None
    """How it takes teachers that know some of the task's classes. `target`: its target is over all
    classes even then, because it models whether the class is one of a teacher's. `losses`: with
    `mix: losses`, where each teacher's loss is over the classes that it knows. None: not, because
    it would mix probabilities that are over different classes, or compare them."""
    most_classes: int | None = None
    """With more classes it is not fitted: its time would grow with their square. None: with any
    number."""
    candidates: tuple[Candidate, ...] = ()
    """How it is compared. Empty for a policy that looks at labels, which would see the answer."""

    def allows_partial(self, settings: Section) -> bool:
        """Whether with these settings a teacher may know some of the classes."""
        losses = self.takes_partial == "losses" and getattr(settings, "mix", None) == "losses"
        return losses or self.takes_partial == "target"


@dataclass(frozen=True, kw_only=True)
class CodecEntry(ConfiguredEntry):
    """How a cache keeps distributions over a vocabulary. `settings` is a `CodecSettings`; the
    implementation is a `VocabularyCodec`, None where logits are kept as they are."""

    keeps_logits: bool = False
    """Whether what is read from the cache is the teacher's logits, to rounding."""
    less_loss: str
    """What to set where it loses too much."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry(Entry):
    """Where examples come from. The implementation is a function (task, cache_folder, progress) ->
    `ds_distill.data.sources.Source`."""

    recognises: Callable[[str], bool] | None = None
    """Whether a recipe's `data.path` is of this source. None: what no other source recognises."""
