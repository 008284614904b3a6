"""The runs of a sweep and its folder, as they can be judged at once: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_distill.errors import UserError
from ds_distill.files import refuse_links_out, why_unwritable
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.recipe.phases import PHASES
from ds_distill.run.folder import SWEEP, RunFolder
from ds_distill.sweep.grid import SEED, Variant


@dataclass(frozen=True)
class SweepRun:
    variant: Variant
    recipe: Recipe
    arguments: tuple[str, ...]
    """By which `ds-distill run` reads the recipe."""
    folder: RunFolder
    file: Path | None = None
    """The recipe's, where the sweep has made it: it is written before anything runs."""

    @property
    def is_done(self) -> bool:
        return self.folder.results.is_file()


def runs_of(
    reference: str, fixed: Sequence[str], found: Sequence[Variant], small: bool, folder: Path
) -> list[SweepRun]:
    """The runs of a recipe under each variant, and with each of its `seeds` where it has some.

    reference: the recipe's file or name. fixed: overrides that all runs have. folder: the sweep's.

    Raises UserError for settings that no recipe can have, where there is but one run, and for runs
    that are judged by unlike scores.
    """
    seeds = load_recipe(reference, [*fixed, *found[0].overrides], small).seeds
    if seeds is not None:
        fixed = [*fixed, "seeds=null"]
        found = [Variant((*one.overrides, f"{SEED}={seed}")) for one in found for seed in seeds]
    if len(found) == 1:
        raise UserError(
            "a sweep needs a key with several values, e.g. seed=1,2,3 or "
            "training.learning_rate=1e-5,3e-5."
        )
    option = ["--small"] if small else []
    runs = [
        SweepRun(
            variant,
            load_recipe(reference, [*fixed, *variant.overrides], small),
            (reference, *fixed, *variant.overrides, *option),
            RunFolder(folder / "runs" / variant.name),
        )
        for variant in found
    ]
    _refuse_unlike_scores(runs)
    return runs


def _refuse_unlike_scores(runs: Sequence[SweepRun]) -> None:
    """Raises UserError where a task's models are judged by other metrics or on other splits: of
    such scores there is no difference, and no best one."""
    seen: dict[str, tuple[str, str]] = {}  # task -> (what judges, the first run)
    for run in runs:
        for task, judge in _judges(run.recipe).items():
            first, name = seen.setdefault(task, (judge, run.variant.name))
            if first != judge:
                raise UserError(
                    f"{name} would be judged by {first} and {run.variant.name} by {judge}: a sweep "
                    "compares its runs by one score. Start a sweep for each."
                )


def _judges(recipe: Recipe) -> dict[str, str]:
    """By task: the metric, and the split of the last phase that evaluates."""
    found = {}
    for phase in recipe.phases:
        if PHASES[phase.kind].makes == "evaluation":
            metric = recipe.task_of(phase).metric
            options = metric.model_dump(exclude={"name"}, exclude_defaults=True)
            shown = "".join(f", {key} {value}," for key, value in options.items())
            splits = ", ".join(split for split, _ in phase.reads)
            found[recipe.task_name(phase)] = f"{metric.name}{shown} on {splits}"
    return found


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raises UserError for a folder that holds something else than a sweep to go on with."""
    refuse_links_out(folder)
    if (folder / SWEEP).is_file():
        if not resume:
            raise UserError(
                f"{folder} holds a sweep. Add --resume to continue it, or give --folder."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and holds no sweep. Give --folder for another one.")
    elif (why := why_unwritable(folder)) is not None:
        raise UserError(f"--folder {folder}: {why}. Name another folder.")
