"""What the settings of all phases have, and of those that train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, Self

from ds_distill.errors import Mistake
from ds_distill.recipe.context import Context
from ds_distill.recipe.part import Part
from ds_distill.recipe.section import Name, Several
from ds_distill.recipe.tasks import TaskSettings
from ds_distill.recipe.terms import Losses
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
    def learns_from(self) -> list[str]:
        """Splits that it trains on or fits to: figures on them say nothing of its outputs."""
        return []

    @property
    def reads(self) -> list[tuple[str, bool]]:
        """Splits that it reads, and of each whether it needs labels."""
        return []

    @property
    def runs_teachers(self) -> bool:
        """Whether it runs the recipe's teachers as they are."""
        return False

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

    follow: Several[Name] | None = None
    """The models that teach in it, in this order: teachers' names, or those of models that earlier
    phases trained, as they are by then. Default: the recipe's teachers."""

    @property
    def runs_teachers(self) -> bool:
        return True

    @property
    def followed(self) -> list[str] | None:
        return self.follow

    def lists(self) -> dict[str, list[str]]:
        return {**super().lists(), **({} if self.follow is None else {"follow": self.follow})}

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        """Models to follow that are not there, or cannot teach."""
        yield from super().mistakes(context)
        at = f"{context.location}.follow"
        for name in self.follow or ():
            if name == "student":
                yield Mistake(
                    f"{at}",
                    "`student` is what is trained here. Save the model that is to teach "
                    "under a name of its own (save_as), and follow that.",
                )
            elif name not in context.models:
                there = ", ".join(sorted(context.models - {"student"})) or "none"
                yield Mistake(f"{at}", f"no model {name!r} before this phase. There are: {there}.")


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

    @property
    def learns_from(self) -> list[str]:
        return [self.split]

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
                f"training would end after epochs without a "
                f"better score, and keep={self.keep} keep the last of them. Set "
                f"{location}.keep=best, or take patience out.",
            )
        late = {name: term.start for name, term in losses.items() if term.start > 0}
        if late and self.keep == "best":
            name = max(late, key=lambda name: late[name])
            yield Mistake(
                f"{location}.losses.{name}.from={late[name]:g}",
                f"keep=best could keep an epoch from "
                f"before the term is active. Set {location}.keep=last.",
            )
        moving = [term for term in losses.values() if term.moves_student]
        if not moving:
            yield Mistake(
                f"{location}.losses",
                f"{', '.join(losses)} has no gradient for the student, which "
                "would learn nothing. Add a term that has one, such as cross_entropy.",
            )
            return
        covered = 0.0
        for start, until in sorted((term.start, term.until) for term in moving):
            if start > covered:
                break
            covered = max(covered, until)
        if covered < 1:
            later = (term.start for term in moving if term.start > covered)
            yield Mistake(
                f"{location}.losses",
                f"no term is active from {covered:g} to "
                f"{min(later, default=1):g} of the phase's steps. Let `from` and `until` of the "
                "terms meet.",
            )


def training_name(outputs: Iterable[str]) -> str:
    """The name of the training of models: of one its own, of several in one engine `A+B`."""
    return "+".join(outputs)
