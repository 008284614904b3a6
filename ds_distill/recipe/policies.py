"""The routing policies: which teacher an example follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import field_validator

from ds_distill.errors import Mistake
from ds_distill.recipe.context import Context
from ds_distill.recipe.part import Needs, OneOf, Part

Mix = Literal["logits", "probabilities", "losses"]

POLICIES: dict[str, type[Routing]] = {}

FITTED = Needs(classes=True, expertise=True)
FITTED_WITH_STATES = Needs(classes=True, expertise=True, fitted_states=True)

GATE_CLASSES = 150
"""A gate's weights, and the time of its fit, grow with the square of the number of classes."""

BASELINE = "average"
"""The candidate that the others are compared with."""

PARTIAL_BASELINE = "average, losses"
"""The same where a teacher knows some of the classes."""


class Compared(NamedTuple):
    """How a policy is compared with others."""

    name: str
    """The policy's, or `NAME, AND HOW`."""
    meaning: str
    """What it takes as the target: half a line."""
    settings: Any = None


class Routing(Part):
    """What the settings of all policies have. A policy runs a function
    (`ds_distill.routing.Asked`) -> Target."""

    kind_of_part, key, table = "policy", "policy", POLICIES

    keeps_lone_teacher: ClassVar[bool] = False
    """Whether with one teacher the target is that teacher's own logits. The router is left out
    then, and a vocabulary's logits need not be made. False is safe."""
    takes_partial: ClassVar[Literal["target", "losses"] | None] = None
    """How it takes teachers that know some of the task's classes. `target`: its target is over all
    classes even then, because it models whether the class is one of a teacher's. `losses`: with
    `mix: losses`, where each teacher's loss is over the classes that it knows. None: not, because
    it would mix probabilities that are over different classes, or compare them."""
    most_classes: ClassVar[int | None] = None
    """With more classes it is not fitted: its time would grow with their square. None: with any
    number."""
    compared: ClassVar[Sequence[Compared]] = ()
    """How it is compared before a student is trained. Empty for a policy that looks at labels,
    which would see the answer."""

    policy: str

    def allows_partial(self) -> bool:
        """Whether with these settings a teacher may know some of the classes."""
        losses = self.takes_partial == "losses" and getattr(self, "mix", None) == "losses"
        return losses or self.takes_partial == "target"


class Weighted(Routing):
    """Settings of a policy that weighs the teachers."""

    mix: Mix | None = None
    """What the weights mix. Default: probabilities for calibrated, losses for ca-mkd and
    mt-bert, else logits."""

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        task = context.task
        if self.mix == "probabilities" and task.numbers:
            yield Mistake(
                f"{context.location}.mix=probabilities",
                f"with {task.location}.type={task.type} teachers predict numbers, and no "
                "probabilities. Leave mix out: numbers are mixed as logits are.",
            )


class Average(Weighted):
    """The mean of all teachers' logits.

    With `mix: losses` a teacher may know some of the classes: its loss is over those. The loss then
    says nothing of how likely one teacher's classes are beside those that only others know."""

    runs = "ds_distill.routing.policies:average"
    keeps_lone_teacher, takes_partial = True, "losses"
    compared = (
        Compared(BASELINE, "the mean of all teachers' logits"),
        Compared(
            PARTIAL_BASELINE,
            "each class's mean probability by the teachers that know it",
            {"mix": "losses"},
        ),
    )

    policy: Literal["average"] = "average"


class Calibrated(Weighted):
    """The mean of the teachers' probabilities, each teacher at the temperature that calibrates it
    on the expertise phase's split."""

    runs, needs = "ds_distill.routing.policies:calibrated", FITTED
    compared = (
        Compared(
            "calibrated", "the mean of their probabilities, each at the temperature that fits it"
        ),
    )

    policy: Literal["calibrated"] = "calibrated"

    @field_validator("mix")
    @classmethod
    def _mixes_what_it_changes(cls, mix: Mix | None) -> Mix | None:
        if mix == "losses":
            raise ValueError(
                "calibrated changes probabilities, and mix=losses would not see it: leave "
                "`mix` out, or take the policy average"
            )
        return mix


class ByExpertise(Weighted):
    """The teacher that predicts a class it is the best at."""

    runs, needs = "ds_distill.routing.policies:expertise", FITTED
    keeps_lone_teacher = True
    compared = (
        Compared(
            "expertise", "the teacher that predicts a class it knows best, else the best of all"
        ),
        Compared(
            "expertise, most-confident",
            "the same; where that leaves a doubt, the most confident teacher",
            {"conflict": "most-confident"},
        ),
    )

    policy: Literal["expertise"] = "expertise"
    conflict: Literal["best-teacher", "best-expert", "most-confident"] = "best-teacher"
    """When several teachers (or none) predict a class they are best at: follow the most accurate
    teacher of all (sections 4.6.1 and 4.7 of the thesis), the more accurate of those in conflict
    (its section 1.3), or the more confident one, each calibrated (ours)."""


class LearnedGate(Routing):
    """A small model of all that the teachers predict, fitted by the expertise phase. A teacher may
    know some of the classes: it learns when the class is one of them."""

    runs, needs = "ds_distill.routing.policies:gate", FITTED_WITH_STATES
    takes_partial, most_classes = "target", GATE_CLASSES
    compared = (
        Compared(
            "gate", "a small model of all they predict, fitted on other examples of the split"
        ),
    )

    policy: Literal["gate"] = "gate"


class Best(Weighted):
    """Always the teacher that is most accurate on the expertise phase's split. All teachers must
    know all classes: what the best one lacks would never be taught."""

    runs, needs = "ds_distill.routing.policies:best", FITTED
    keeps_lone_teacher = True
    compared = (Compared("best", "always the teacher that is right most often"),)

    policy: Literal["best"] = "best"


class Random(Weighted):
    """One teacher per example and epoch, all equally likely. With `mix: losses` it may know some
    of the classes, as with the policy average."""

    runs = "ds_distill.routing.policies:random"
    keeps_lone_teacher, takes_partial = True, "losses"
    compared = (Compared("random", "a random teacher for each example"),)

    policy: Literal["random"] = "random"


class ByColumn(Weighted):
    """The teacher that the data name for an example, in the column `columns.teacher` of its task;
    where they name none, all alike, as with the policy average. With `mix: losses` a teacher may
    know some of the classes."""

    runs, needs = "ds_distill.routing.policies:column", Needs(teacher_ids=True)
    keeps_lone_teacher, takes_partial = True, "losses"

    policy: Literal["column"] = "column"


class Chosen(Routing):
    """What the expertise phase found best on its split."""

    needs = FITTED_WITH_STATES
    keeps_lone_teacher, takes_partial = True, "target"

    policy: Literal["chosen"] = "chosen"


class ConfidenceAware(Weighted):
    """Weights that fall with each teacher's error on the label (CA-MKD)."""

    runs, needs = "ds_distill.routing.policies:ca_mkd", Needs(labels=True, distributions=True)
    keeps_lone_teacher = True

    policy: Literal["ca-mkd"] = "ca-mkd"


class MTBert(Weighted):
    """Weights 1 / (1 + cross-entropy with the label), which do not sum to 1 (MT-BERT)."""

    runs, needs = "ds_distill.routing.policies:mt_bert", Needs(labels=True, distributions=True)

    policy: Literal["mt-bert"] = "mt-bert"


Policy = Annotated[Routing, OneOf("policy", "policy", POLICIES)]


def that_take_partial() -> list[str]:
    """The policies that take teachers of some of the classes, as a message names them."""
    how = {"target": "", "losses": " with mix: losses"}
    return [
        f"{name}{how[policy.takes_partial]}"
        for name, policy in POLICIES.items()
        if policy.takes_partial is not None
    ]


def candidates(*, partial: bool = False, classes: int = 0) -> dict[str, Compared]:
    """What is compared before a student is trained, by name, each with its settings as the policy's
    class has them; of equals the first is chosen.

    partial: whether a teacher knows some of the classes. classes: how many there are.
    """
    found = {
        one.name: Compared(one.name, one.meaning, policy.model_validate(one.settings or {}))
        for policy in POLICIES.values()
        if policy.most_classes is None or classes <= policy.most_classes
        for one in policy.compared
    }
    if partial:
        return {name: one for name, one in found.items() if one.settings.allows_partial()}
    return {name: one for name, one in found.items() if name != PARTIAL_BASELINE}


def not_fitted(classes: int) -> dict[str, str]:
    """The policies that are not fitted on so many classes, and why."""
    return {
        name: f"it is fitted on {policy.most_classes:,} classes at most, and there are {classes:,}"
        for name, policy in POLICIES.items()
        if policy.most_classes is not None and classes > policy.most_classes
    }


def baseline_of(*, partial: bool) -> str:
    """The candidate that the others are compared with; see `candidates`."""
    return PARTIAL_BASELINE if partial else BASELINE
