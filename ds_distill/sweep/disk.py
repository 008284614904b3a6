"""How much of the disk a sweep takes, before anything runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_distill.check.machine_memory import fewest_parameters
from ds_distill.errors import UserError
from ds_distill.models.student import config_of
from ds_distill.planning.caches import example_bytes
from ds_distill.planning.split_sizes import SplitFacts, label_names, split_facts
from ds_distill.planning.units import amount
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import Step, steps
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.training import Training

_WEIGHT = 4
"""Bytes of a parameter in a finished model."""
_CHECKPOINT = 32
"""Bytes of a parameter in training: two checkpoints, the last and the one that is being written, of
fp32 weights and Adam's two moments; the best weights so far, and better ones that are written."""
_TOKEN = 10
"""Bytes of a token of the data: its text and its number for a model."""


@dataclass(frozen=True)
class Taken:
    """Bytes that some phases of a run take."""

    models: int = 0
    caches: int = 0
    data: int = 0
    training: int = 0
    """While the largest model is trained, and no longer."""

    @property
    def stays(self) -> int:
        return self.models + self.caches + self.data


Known = dict[str, SplitFacts]
"""What was read of the data, by what decides it."""


def taken(recipe: Recipe, known: Known, first: int = 0, until: int | None = None) -> Taken:
    """Of a run's phases from number `first`, those before `until`. Splits whose examples cannot be
    counted count nothing. Reads data, those that `known` does not have, and adds them."""
    given = {
        name: fewest_parameters(config_of(recipe, name)) for name in (*recipe.teachers, "student")
    }
    numbers = [
        [given[step.left()[name].origin] for name in step.phase.outputs] for step in steps(recipe)
    ]
    facts: dict[tuple[str, str], SplitFacts] = {}
    models, caches, training = 0, 0, 0
    last = len(recipe.phases) if until is None else until
    for step, sizes in zip(steps(recipe)[:last], numbers, strict=False):
        phase, task = step.phase, recipe.task_of(step.phase)
        for split, _ in phase.reads:
            key = step.task_name, split
            about = f"{split} {recipe.student} {recipe.data_folder} {task!r}"
            if about not in known:
                known[about] = split_facts(recipe, task, split)
            facts[key] = known[about]
        if step.number < first:
            continue
        models += _WEIGHT * sum(sizes)
        if isinstance(phase, Training):
            training = max(training, _CHECKPOINT * max(sizes, default=0))
        if isinstance(phase, Cache) and phase.folder is None:
            for split in phase.splits:
                facts_of = facts[step.task_name, split]
                caches += round((facts_of.examples or 0) * _row(recipe, step, phase, facts_of))
    if last == len(recipe.phases) and any(numbers):  # the student to ship is a copy
        models += _WEIGHT * max(n for each in numbers for n in each)
    tokenizers = len(recipe.teachers) + 1
    data = sum((one.examples or 0) * one.tokens * _TOKEN * tokenizers for one in facts.values())
    return Taken(models, caches, round(data), training)


def _row(recipe: Recipe, step: Step, phase: Cache, facts: SplitFacts) -> float:
    """Bytes of an example in the cache that a phase makes, of all teachers."""
    task = recipe.task_of(phase)
    classes = len(label_names(recipe, task)) or None
    configs = (config_of(recipe, step.model(name).origin) for name in step.teachers)
    return sum(example_bytes(phase, task, config, classes, facts.tokens) for config in configs)


def most_at_a_time(
    runs: Sequence[Taken], shared: Sequence[Taken], jobs: int, keep: bool
) -> dict[str, int]:
    """Bytes by kind, at the moment when they are most: what runs share is there until the end, and
    with it `jobs` runs; or all, where they are kept.

    runs: what each takes beside what it shares.
    """
    jobs = min(jobs, len(runs))
    largest = sorted(runs, key=lambda run: run.stays + run.training)[-jobs:]
    at_once = list(runs) if keep else largest
    training = sorted(run.training for run in [*runs, *shared])[-jobs:]
    return {
        "models": sum(one.models for one in [*shared, *at_once]),
        "caches": sum(one.caches for one in [*shared, *at_once]),
        "data": sum(one.data for one in [*shared, *at_once]),
        "checkpoints": sum(training),
    }


def check_disk(folder: Path, most: Mapping[str, int], *, resume: bool) -> str:
    """The sentence that says what is needed and what is free. Raises UserError where the free space
    is not enough; a sweep that goes on has some of it already."""
    existing = next(
        parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.is_dir()
    )
    free, needed = shutil.disk_usage(existing).free, sum(most.values())
    kinds = ", ".join(f"{kind} {amount(size)}" for kind, size in most.items() if size)
    if needed > free and not resume:
        raise UserError(
            f"--folder {folder}: the runs take about {amount(needed)} at a time ({kinds}), and "
            f"{amount(free)} are free there. Name a folder on a larger disk, or take fewer --jobs, "
            "or leave --keep out."
        )
    return f"Disk: at most about {amount(needed)} at a time ({kinds}), {amount(free)} are free"
