"""What is wrong with the teachers that data name for the routing policy `column`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import datasets

from ds_distill.data.sources import Source
from ds_distill.data.teacher_column import teacher_names
from ds_distill.errors import Mistake, did_you_mean
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.phase import TrainingPhase


def named_teacher_mistakes(
    recipe: Recipe, task_name: str, source: Source, read: Mapping[str, datasets.Dataset]
) -> Iterator[Mistake]:
    """Of each phase of a task that follows the teachers that its examples name: that they name
    none, or one that the phase has not, or that an earlier phase may have left out.

    read: the splits that could be read.
    """
    for step in steps(recipe):
        phase = step.phase
        if step.task_name != task_name or not isinstance(phase, TrainingPhase):
            continue
        for key, part in phase.parts():
            if not part.all_needs().teacher_ids:
                continue
            leaves = [one.name for one in step.earlier_of_task() if one.phase.leaves_out_teachers]
            if leaves and phase.followed is None:
                yield Mistake(
                    f"phases.{step.name}.{key}",
                    f"{part.part_name} follows the teacher that each example "
                    f"names, and phases.{leaves[-1]} may leave it out. Set follow: "
                    f"[{', '.join(step.teachers)}], or take leave_out out.",
                )
            if phase.split in read:
                location = f"phases.{step.name}.{key}"
                for why in _of_split(phase.split, step.teachers, source, read):
                    yield Mistake(location, f"{part.part_name}{why}")


def _of_split(
    split: str, teachers: Sequence[str], source: Source, read: Mapping[str, datasets.Dataset]
) -> Iterator[str]:
    """What goes on after the policy's name."""
    data, key = read[split], f"{source.task.location}.data.columns.teacher"
    found = teacher_names(data)
    if found is None:
        yield (
            f" follows the teacher that each example names, and those of split {split!r} name "
            f"none. Set {key} to the column that has the names."
        )
        return
    names, numbers = found
    for number, name in enumerate(names):
        if name in teachers:
            continue
        rows = (numbers == number).nonzero()[0]
        first = data[int(rows[0])]
        at = first["key_hi"], first["key_lo"]
        where = source.locations(split, {at}).get(at, f"split {split!r}")
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        yield (
            f": {where}{more}: {name!r} is no teacher of this phase, which has "
            f"{', '.join(teachers)}.{did_you_mean(name, teachers)} Correct the name, or leave it "
            "out: such an example follows all teachers alike."
        )
