"""The routing policies: which teacher an example follows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from ds_distill.parts.entry import Candidate, Needs, PolicyEntry
from ds_distill.parts.section import Section

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
    """The mean of all teachers' logits."""

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


class Posterior(Routing):
    """Bayes' rule from how the teachers confuse classes on the expertise phase's split."""

    policy: Literal["posterior"] = "posterior"


class LearnedGate(Routing):
    """A small model of all that the teachers predict, fitted by the expertise phase."""

    policy: Literal["gate"] = "gate"


class Best(Weighted):
    """Always the teacher that is most accurate on the expertise phase's split."""

    policy: Literal["best"] = "best"


class Random(Weighted):
    """One teacher per example and epoch, all equally likely."""

    policy: Literal["random"] = "random"


class Chosen(Routing):
    """What the expertise phase found best on its split."""

    policy: Literal["chosen"] = "chosen"


class ConfidenceAware(Weighted):
    """Weights that fall with each teacher's error on the label (CA-MKD)."""

    policy: Literal["ca-mkd"] = "ca-mkd"


class MTBert(Weighted):
    """Weights 1 / (1 + cross-entropy with the label), which do not sum to 1 (MT-BERT)."""

    policy: Literal["mt-bert"] = "mt-bert"


BASELINE = "average"
"""The candidate that the others are compared with."""

_FITTED = Needs(classes=True, expertise=True)
_MODULE = "ds_distill.routing.policies"

POLICIES: dict[str, PolicyEntry] = {
    entry.name: entry
    for entry in (
        PolicyEntry(
            name="average",
            settings=Average,
            implementation=f"{_MODULE}:average",
            keeps_lone_teacher=True,
            candidates=(Candidate(BASELINE, Average(), "the mean of all teachers' logits"),),
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
            name="posterior",
            settings=Posterior,
            implementation=f"{_MODULE}:posterior",
            needs=_FITTED,
            candidates=(
                Candidate(
                    "posterior", Posterior(), "Bayes' rule from how teachers confuse classes"
                ),
            ),
        ),
        PolicyEntry(
            name="gate",
            settings=LearnedGate,
            implementation=f"{_MODULE}:gate",
            needs=Needs(classes=True, expertise=True, fitted_states=True),
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
            keeps_lone_teacher=True,
            candidates=(Candidate("random", Random(), "a random teacher for each example"),),
        ),
        PolicyEntry(
            name="chosen",
            settings=Chosen,
            implementation=None,
            needs=Needs(classes=True, expertise=True, fitted_states=True),
            keeps_lone_teacher=True,
        ),
        PolicyEntry(
            name="ca-mkd",
            settings=ConfidenceAware,
            implementation=f"{_MODULE}:ca_mkd",
            needs=Needs(labels=True),
            keeps_lone_teacher=True,
        ),
        PolicyEntry(
            name="mt-bert",
            settings=MTBert,
            implementation=f"{_MODULE}:mt_bert",
            needs=Needs(labels=True),
        ),
    )
}


def routing_of(policy: str, **settings: Any) -> Routing:
    """A policy's settings, as a recipe's `routing: {policy: NAME, ...}` gives them."""
    section = POLICIES[policy].settings(**settings)
    assert isinstance(section, Routing)
    return section


def candidates() -> dict[str, Candidate]:
    """What is compared before a student is trained, by name; of equals the first is chosen."""
    return {
        candidate.name: candidate for entry in POLICIES.values() for candidate in entry.candidates
    }
