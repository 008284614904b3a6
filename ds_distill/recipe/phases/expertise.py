"""The expertise phase."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_distill.recipe.entry import Needs, PhaseEntry
from ds_distill.recipe.phases.base import PhaseSettings
from ds_distill.recipe.section import Name


class Expertise(PhaseSettings):
    """Learn from a labelled split what each teacher knows: accuracy per class, calibration,
    a gate. Compare all routing policies on it and choose one."""

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


ENTRY = PhaseEntry(
    name="expertise",
    settings=Expertise,
    implementation="ds_distill.phases.expertise:expertise",
    needs=Needs(teachers=1, classes=True),
    makes="expertise",
)
