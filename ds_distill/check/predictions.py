"""What is wrong with teachers' files of predictions, and what is worth a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np

from ds_distill.check.phases import has_files
from ds_distill.data.columns import example_keys
from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.data.predictions import FilePredictions, first_other, open_predictions
from ds_distill.data.sources import Source
from ds_distill.errors import Mistake, UserError
from ds_distill.keys import among_keys
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.phases import Cache, Distil, Expertise, PhaseSettings
from ds_distill.recipe.references import predictions_file

SHOWN = 3
"""Examples without an entry that a message names."""


class Predictions:
    """The files of the teachers that a task's phases run."""

    def __init__(
        self, recipe: Recipe, task: str, source: Source, read: Mapping[str, datasets.Dataset]
    ) -> None:
        """read: the splits that phases use."""
        self._recipe, self._source, self._read = recipe, source, read
        of_task = (step for step in steps(recipe) if step.task_name == task)
        self._steps = [step for step in of_task if step.phase.runs_teachers]
        asked = dict.fromkeys(teacher for step in self._steps for teacher in step.teachers)
        known = has_files(recipe.tasks_by_name[task])
        self._teachers = [teacher for teacher in asked if known and teacher in recipe.from_files]

    def mistakes(self) -> Iterator[Mistake]:
        """Files that cannot be read, and splits of which they lack examples that must be there.
        What is cached for a student may lack some, and what is evaluated too."""
        for teacher in self._teachers:
            at = f"teachers.{teacher}.predictions"
            try:
                file = self._file(teacher)
            except UserError as error:
                yield from (
                    one if one.at.startswith(at) else Mistake(at, str(one))
                    for one in error.mistakes
                )
                continue
            lacking = {split: keys for split in self._read if len(keys := self._lacks(split, file))}
            for step in self._steps:
                phase, all_of = step.phase, isinstance(step.phase, Expertise)
                live = isinstance(phase, Distil) and phase.teachers == "live"
                for split, _ in phase.reads if teacher in step.teachers else ():
                    nothing = len(lacking.get(split, ())) == len(self._read.get(split, ()))
                    cached = isinstance(phase, Cache) and nothing
                    if split in lacking and (all_of or live or cached):
                        yield Mistake(
                            at,
                            f"{self._lack(split, lacking.pop(split))}, and phase "
                            f"{step.name!r} asks for them. {_REMEDY[live]}",
                        )

    def lacking(self, phase: PhaseSettings) -> list[str]:
        """The teachers whose files lack examples of a phase; none that cannot be read."""
        found = []
        for teacher in self._teachers:
            with suppress(UserError):  # one of the mistakes
                file = self._file(teacher)
                if any(len(self._lacks(split, file)) for split, _ in phase.reads):
                    found.append(teacher)
        return found

    def notes(self) -> Iterator[str]:
        """Of files without mistakes: what they lack, and what they have that is of no example."""
        for teacher in self._teachers:
            at, file = f"teachers.{teacher}.predictions", self._file(teacher)
            of_file = np.stack([file.high, file.low], axis=1)
            used = np.concatenate([example_keys(data) for data in self._read.values()])
            if file.unknown is not None:
                yield f"{at}: the ids of {file.unknown} of its rows are of no example here."
            if unknown := int((~among_keys(of_file, used)).sum()):
                where = first_other(self._path(teacher), self._source, [*self._read], used)
                yield (
                    f"{at}: {unknown:,} of its {len(file):,} texts are in no split that is used "
                    f"here (such as {where})."
                )
            of_teacher = [step.phase for step in self._steps if teacher in step.teachers]
            evaluated = {CHOOSING_SPLIT}
            for phase in of_teacher:
                if phase.makes == "evaluation":
                    evaluated |= {split for split, _ in phase.reads}
            asked = {split for phase in of_teacher for split, _ in phase.reads} | evaluated
            for split in (split for split in self._read if split in asked):
                if len(missing := self._lacks(split, file)):
                    judged = split in evaluated
                    then = "it is judged on the others" if judged else "nobody follows it on these"
                    if judged and len(missing) == len(self._read[split]):
                        then = "it is not judged there"
                    yield f"{at}: {self._lack(split, missing)}: {then}."

    def _file(self, teacher: str) -> FilePredictions:
        return open_predictions(self._path(teacher), self._source, [*self._read])

    def _path(self, teacher: str) -> Path:
        file = self._recipe.from_files[teacher]
        return predictions_file(teacher, file, self._recipe.data_folder)

    def _lacks(self, split: str, file: FilePredictions) -> np.ndarray:
        """Content keys, int64 [M, 2], of the examples of a split that a file lacks."""
        keys = example_keys(self._read[split])
        return keys[file.find(keys) < 0]

    def _lack(self, split: str, missing: np.ndarray) -> str:
        """What a file lacks of a split, in words."""
        keys = {(hi, lo) for hi, lo in missing[:SHOWN].tolist()}
        places = list(self._source.locations(split, keys).values())
        more = " ..." if len(missing) > SHOWN else ""
        shown = f" ({', '.join(places)}{more})" if places else ""
        return (
            f"has nothing of {len(missing):,} of {len(self._read[split]):,} examples of split "
            f"{split!r}{shown}"
        )


_REMEDY = {
    False: "Add them, with the texts as they are in the data, or take them out of the data.",
    True: "Add them, with the texts as they are in the data, or cache that split and set "
    "teachers=cached: a cache may lack some.",
}
"""By whether a live teacher is asked."""
