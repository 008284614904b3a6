"""The routing policies: which teacher an example follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import Candidate, Needs, PolicyEntry
from ds_distill.recipe.section import Section

Mix = Literal["logits", "probabilities", "losses"]


class Routing(Section):
    """What the settings of all policies have."""

    policy: str


class Weighted(Routing):
    """Settings of a policy that weighs the teachers."""

    mix: Mix | None = None
    """What the weights mix. Default: probabilities for calibrated, losses for ca-mkd and
    mt-bert, else logits."""


class Average(Weighted):
    """The mean of all teachers' logits.

    With `mix: losses` a teacher may know some of the classes: its loss is over those. The loss then
    says nothing of how likely one teacher's classes are beside those that only others know."""

    policy: Literal["average"] = "average"


class Calibrated(Weighted):
    """The mean of the teachers' probabilities, each teacher at the temperature that calibrates it
    on the expertise phase's split."""

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

    policy: Literal["expertise"] = "expertise"
    conflict: Literal["best-teacher", "best-expert", "most-confident"] = "best-teacher"
    """When several teachers (or none) predict a class they are best at: follow the most accurate
    teacher of all (sections 4.6.1 and 4.7 of the thesis), the more accurate of those in conflict
    (its section 1.3), or the more confident one, each calibrated (ours)."""


class LearnedGate(Routing):
    """A small model of all that the teachers predict, fitted by the expertise phase. A teacher may
    know some of the classes: it learns when the class is one of them."""

    policy: Literal["gate"] = "gate"


class Best(Weighted):
    """Always the teacher that is most accurate on the expertise phase's split. All teachers must
    know all classes: what the best one lacks would never be taught."""

    policy: Literal["best"] = "best"


class Random(Weighted):
    """One teacher per example and epoch, all equally likely. With `mix: losses` it may know some
    of the classes, as with the policy average."""

    policy: Literal["random"] = "random"


class ByColumn(Weighted):
    """The teacher that the data name for an example, in the column `columns.teacher` of its task;
    where they name none, all alike, as with the policy average. With `mix: losses` a teacher may
    know some of the classes."""

    policy: Literal["column"] = "column"


class Chosen(Routing):
    """What the expertise phase found best on its split."""

    policy: Literal["chosen"] = "chosen"


class ConfidenceAware(Weighted):
    """Weights that fall with each teacher's error on the label (CA-MKD)."""

    policy: Literal["ca-mkd"] = "ca-mkd"


class MTBert(Weighted):
    """Weights 1 / (1 + cross-entropy with the label), which do not sum to 1 (MT-BERT)."""

    policy: Literal["mt-bert"] = "mt-bert"


GATE_CLASSES = 150
"""A gate's weights, and the time of its fit, grow with the square of the number of classes."""

BASELINE = "average"
"""The candidate that the others are compared with."""

PARTIAL_BASELINE = "average, losses"
"""The same where a teacher knows some of the classes."""


def _mix_mistakes(settings: Weighted, context: Context) -> Iterator[str]:
    task = context.task
    if settings.mix == "probabilities" and task.predicts == "number":
        yield (
            f"{context.location}.mix=probabilities: with {task.location}.type={task.type} teachers "
            "predict numbers, and no probabilities. Leave mix out: numbers are mixed as logits are."
        )


_FITTED = Needs(classes=True, expertise=True)
_MODULE = "ds_distill.routing.policies"

POLICIES: dict[str, PolicyEntry] = {
    entry.name: entry
    for entry in (
        PolicyEntry(
            name="average",
            settings=Average,
            implementation=f"{_MODULE}:average",
            mistakes=_mix_mistakes,
            keeps_lone_teacher=True,
            takes_partial="losses",
            candidates=(
                Candidate(BASELINE, Average(), "the mean of all teachers' logits"),
                Candidate(
                    PARTIAL_BASELINE,
                    Average(mix="losses"),
                    "each class's mean probability by the teachers that know it",
                    for_partial=True,
                ),
            ),
        ),
        PolicyEntry(
            name="calibrated",
            settings=Calibrated,
            implementation=f"{_MODULE}:calibrated",
            needs=_FITTED,
            candidates=(
                Candidate(
                    "calibrated",
                    Calibrated(),
                    "the mean of their probabilities, each at the temperature that fits it",
                ),
            ),
        ),
        PolicyEntry(
            name="expertise",
            settings=ByExpertise,
            implementation=f"{_MODULE}:expertise",
            needs=_FITTED,
            keeps_lone_teacher=True,
            candidates=(
                Candidate(
                    "expertise",
                    ByExpertise(),
                    "the teacher that predicts a class it knows best, else the best of all",
                ),
                Candidate(
                    "expertise, most-confident",
                    ByExpertise(conflict="most-confident"),
                    "the same; where that leaves a doubt, the most confident teacher",
                ),
            ),
        ),
        PolicyEntry(
            name="gate",
            settings=LearnedGate,
            implementation=f"{_MODULE}:gate",
            needs=Needs(classes=True, expertise=True, fitted_states=True),
            takes_partial="target",
            most_classes=GATE_CLASSES,
            candidates=(
                Candidate(
                    "gate",
                    LearnedGate(),
                    "a small model of all they predict, fitted on other examples of the split",
                ),
            ),
        ),
        PolicyEntry(
            name="best",
            settings=Best,
            implementation=f"{_MODULE}:best",
            needs=_FITTED,
            keeps_lone_teacher=True,
            candidates=(Candidate("best", Best(), "always the teacher that is right most often"),),
        ),
        PolicyEntry(
            name="random",
            settings=Random,
            implementation=f"{_MODULE}:random",
            mistakes=_mix_mistakes,
            keeps_lone_teacher=True,
            takes_partial="losses",
            candidates=(Candidate("random", Random(), "a random teacher for each example"),),
        ),
        PolicyEntry(
            name="column",
            settings=ByColumn,
            implementation=f"{_MODULE}:column",
            needs=Needs(teacher_ids=True),
            mistakes=_mix_mistakes,
            keeps_lone_teacher=True,
            takes_partial="losses",
        ),
        PolicyEntry(
            name="chosen",
            settings=Chosen,
            implementation=None,
            needs=Needs(classes=True, expertise=True, fitted_states=True),
            keeps_lone_teacher=True,
            takes_partial="target",
        ),
        PolicyEntry(
            name="ca-mkd",
            settings=ConfidenceAware,
            implementation=f"{_MODULE}:ca_mkd",
            needs=Needs(labels=True, distributions=True),
            keeps_lone_teacher=True,
        ),
        PolicyEntry(
            name="mt-bert",
            settings=MTBert,
            implementation=f"{_MODULE}:mt_bert",
            needs=Needs(labels=True, distributions=True),
        ),
    )
}


def that_take_partial() -> list[str]:
    """The policies that take teachers of some of the classes, as a message names them."""
    how = {"target": "", "losses": " with mix: losses"}
    entries = [entry for entry in POLICIES.values() if entry.takes_partial is not None]
    return [f"{entry.name}{how[entry.takes_partial or 'target']}" for entry in entries]


def candidates(*, partial: bool = False, classes: int = 0) -> dict[str, Candidate]:
    """What is compared before a student is trained, by name; of equals the first is chosen.

    partial: whether a teacher knows some of the classes. classes: how many there are.
    """
    return {
        candidate.name: candidate
        for entry in POLICIES.values()
        if entry.most_classes is None or classes <= entry.most_classes
        for candidate in entry.candidates
        if (entry.allows_partial(candidate.settings) if partial else not candidate.for_partial)
    }


def not_fitted(classes: int) -> dict[str, str]:
    """The policies that are not fitted on so many classes, and why."""
    return {
        entry.name: f"it is fitted on {entry.most_classes:,} classes at most, and there are "
        f"{classes:,}"
        for entry in POLICIES.values()
        if entry.most_classes is not None and classes > entry.most_classes
    }


def baseline_of(*, partial: bool) -> str:
    """The candidate that the others are compared with; see `candidates`."""
    return PARTIAL_BASELINE if partial else BASELINE
