"""A recipe that is run for a few steps of each training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ds_distill.engine.config import STEPS_AHEAD
from ds_distill.recipe import LONE_TASK, Recipe
from ds_distill.recipe.phases import TrainingPhase
from ds_distill.training.meter import WARM_UP_STEPS

SAMPLE = STEPS_AHEAD
"""Steps that are timed together: reading the clock after each would keep a GPU from running
ahead, and the first of a window has its teachers' pass."""

_OTHER_EXAMPLES = 128
"""Of splits that no training reads."""


def total_steps(measured: int) -> int:
    """Optimizer steps of each training of which so many are to be measured."""
    return WARM_UP_STEPS + measured


def shortening(recipe: Recipe, measured: int, splits: Mapping[str, Collection[str]]) -> list[str]:
    """Overrides that make a recipe short: `measured` steps of each training beside warm-up, one
    epoch of examples for them, and few for all else.

    splits: those that the data have, by task.
    """
    return list(_overrides(recipe, total_steps(measured), splits))


def _once(steps: int) -> int:
    """A `save_every` that makes one checkpoint before the end, between two samples if it can."""
    last = SAMPLE * ((steps - 1) // SAMPLE)
    return last if 2 * last > steps else steps - 1


def _overrides(recipe: Recipe, steps: int, splits: Mapping[str, Collection[str]]) -> Iterator[str]:
    yield f"logging={{every: {SAMPLE}}}"
    yield "training.patience=null"
    wanted = {task: dict.fromkeys(names, _OTHER_EXAMPLES) for task, names in splits.items()}
    for name, phase in recipe.named_phases():
        if isinstance(phase, TrainingPhase):
            of_task = wanted[recipe.task_name(phase)]
            of_task[phase.split] = max(of_task.get(phase.split, 0), steps * phase.batch_size)
            yield f"phases.{name}.steps={steps}"
            yield f"phases.{name}.patience=null"
            yield f"phases.{name}.save_every={_once(steps)}"
    for name, task in recipe.tasks_by_name.items():
        section = "task" if name == LONE_TASK and recipe.task is not None else f"tasks.{name}"
        for split, most in wanted[name].items():
            least = min(most, task.data.limit.get(split, most))
            yield f"{section}.data.limit.{split}={least}"
