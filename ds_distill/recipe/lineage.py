"""What each phase of a recipe finds: the models, what each came from and which phase made it, and
what the phases before have kept of the teachers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ds_distill.recipe.context import Context, Model
from ds_distill.recipe.phases import Cache, Expertise, PhaseSettings
from ds_distill.recipe.schema import Recipe


@dataclass(frozen=True)
class Step(Context):
    """A phase when its turn comes. One with a mistake counts as corrected for those after it."""

    recipe: Recipe = field(repr=False)
    number: int
    name: str
    earlier: Sequence[Step] = field(repr=False)
    """Of all phases before it, in order."""

    @property
    def phase(self) -> PhaseSettings:
        return self.recipe.phases[self.number]

    def left(self) -> dict[str, Model]:
        """By name: the models that phases up to this one have made."""
        return {**self.found, **{output: self._made(output) for output in self.phase.outputs}}

    def _made(self, output: str) -> Model:
        phase = self.phase
        names = phase.starts
        if len(names) == len(phase.outputs):
            names = [phase.start_of(output)]
        starts = [self.model(name) for name in names] or [Model(output, output)]
        learnt = frozenset((self.task_name, split) for split in phase.learns_from)
        goes_on = any(start.distilled and start.head == self.task_name for start in starts)
        return Model(
            output,
            starts[0].origin,
            self.number,
            self.task_name,
            phase.vocabulary or starts[0].vocabulary,
            starts[0].expanded + ((self.number,) if phase.vocabulary else ()),
            learnt.union(*(start.seen for start in starts)),
            phase.makes == "student" or goes_on,
        )

    # ------------------------------------------------------------------ of the phase's task

    def caches(self, split: str) -> Iterator[tuple[Step, Cache]]:
        """The cache phases before it that hold a split, of all its teachers; the last one first."""
        return caches(self.earlier, self.task_name, split, self.teachers)

    def held(self, split: str) -> Cache | None:
        """The last of them, if its teachers are as they were."""
        kept = (cache for step, cache in self.caches(split) if self._as_in(step, self.teachers))
        return next(kept, None)

    @property
    def may_be_cached(self) -> bool:
        """Whether an earlier cache phase names no split: any could have been meant."""
        caches = (step.phase for step in self.earlier_of_task())
        return any(isinstance(phase, Cache) and not phase.splits for phase in caches)

    @property
    def expertise(self) -> Step | None:
        """The last expertise phase, if the recipe's teachers are as they were."""
        fits = (s for s in reversed(self.earlier_of_task()) if isinstance(s.phase, Expertise))
        last = next(fits, None)
        return last if last is not None and self._as_in(last, self.recipe.teachers) else None

    @property
    def fitted_states(self) -> bool:
        """Whether the gate of that phase reads the teachers' states."""
        fits = self.expertise
        if fits is None:
            return False
        assert isinstance(fits.phase, Expertise)
        held = fits.held(fits.phase.split)
        return fits.phase.states and (held is None or -1 in held.hidden)

    def earlier_of_task(self) -> list[Step]:
        """The phases of its task before it, in order."""
        return [step for step in self.earlier if step.task_name == self.task_name]

    def _as_in(self, earlier: Step, names: Collection[str]) -> bool:
        return all(self.model(name) == earlier.model(name) for name in names)


def steps(recipe: Recipe) -> list[Step]:
    """Of each phase, in order."""
    found: list[Step] = []
    names = recipe.phase_names()
    for number, (name, phase) in enumerate(zip(names, recipe.phases, strict=True)):
        step = Step(
            f"phases.{name}",
            recipe.task_name(phase),
            recipe.task_of(phase),
            recipe.teachers_of(phase),
            list(recipe.teachers),
            found[-1].left() if found else {},
            names,
            recipe,
            number,
            name,
            tuple(found),
        )
        found.append(step)
    return found


def caches(
    steps: Sequence[Step], task: str, split: str, teachers: Collection[str] = ()
) -> Iterator[tuple[Step, Cache]]:
    """The cache phases among some steps that hold a task's split, of all these teachers; the last
    one first. Those that `only_if_read` leaves out hold nothing."""
    for step in reversed(steps):
        phase, of_all = step.phase, {*teachers} <= {*step.teachers}
        if not isinstance(phase, Cache) or phase.is_left_out(step.recipe.phases[step.number + 1 :]):
            continue
        if step.task_name == task and split in phase.splits and of_all:
            yield step, phase


def model_at(recipe: Recipe, name: str, number: int) -> Model:
    """The model `name` as phase `number` finds it; as all leave it, where there are no more."""
    before = steps(recipe)[:number]
    return (before[-1].left() if before else {}).get(name, Model(name, name))


def trained_on(recipe: Recipe, task: str, split: str) -> list[str]:
    """Names of the models that a phase trains on a task's split, and of those that start from
    one."""
    made = steps(recipe)[-1].left().values()
    return [model.name for model in made if (task, split) in model.seen]


def students(recipe: Recipe) -> list[tuple[int, Model]]:
    """(phase number, what it left) of each training of what is distilled or came from `student`, in
    order; in a recipe that trains no such model, of each other training."""
    trained = [
        (step.number, step.left()[output])
        for step in steps(recipe)
        for output in step.phase.outputs
        if step.phase.makes != "start"
    ]
    own = [(n, model) for n, model in trained if model.distilled or model.origin == "student"]
    return own or trained


def shippable(recipe: Recipe, chooses: str) -> list[tuple[int, str]]:
    """(phase number, name) of the students of which one is shipped, in order: that of `ships`, or
    else those of the task of the last distillation, for scores on different tasks cannot be
    compared. A name is that of its last training, which evaluations find under it.

    Distilled students come before other trained ones, and those that teach no other before those
    that do. One that was trained on the split that chooses is there only without any other.

    chooses: that split.
    """
    found = students(recipe)
    if recipe.ships is not None:
        return [(n, model.name) for n, model in found if model.name == recipe.ships][-1:]
    found = [one for one in found if one[1].distilled] or found
    found = [one for one in found if one[1].head == found[-1][1].head]
    final = {model.name: number for number, model in found}
    found = [(number, model) for number, model in found if final[model.name] == number]
    found = [one for one in found if one[1].name not in recipe.followed] or found
    found = [one for one in found if (one[1].head, chooses) not in one[1].seen] or found
    return [(number, model.name) for number, model in found]
