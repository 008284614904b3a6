"""The main job in one call: `ds-distill init` and `ds-distill run`, from a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_distill.errors import UserError
from ds_distill.files import write_text
from ds_distill.run.run_recipe import FinishedRun, run_recipe


def distil(
    data: str | Path,
    *,
    teachers: Sequence[str],
    student: str | None = None,
    folder: str | Path | None = None,
    overrides: Sequence[str] = (),
    task: str | None = None,
    text: Sequence[str] = (),
    label: str | None = None,
) -> FinishedRun:
    """Distil teachers into a student on the examples of a folder or a file.

        done = distil("reviews", teachers=["models/bert", "models/roberta"], student="models/small")

    What the columns are, the labels and the length are guessed as `ds-distill init` does. The
    recipe is printed, and written beside the run's folder: the next run may change it.

    data: a folder with a file for each split, or one file.
    teachers: folders or hub ids; one without a head for the task is fine-tuned first.
    student: a folder or hub id; None for some of the first teacher's layers.
    folder: of the run; None for runs/ and the name of the data.
    overrides: changes of the recipe, such as "training.epochs=3".
    task, text, label: `task.type` and names of columns, where they are not to be guessed.

    Raises UserError for what you can fix.
    """
    from ds_distill.init.guess import DataOptions, guess
    from ds_distill.init.recipe import recipe_text
    from ds_distill.recipe import load_recipe

    path = Path(folder or Path("runs") / Path(data).resolve().name.split(".")[0])
    if not Path(data).exists():
        raise UserError(f"{data}: no such file or folder.")
    found = guess(Path(data), DataOptions(task, text, label))
    written = recipe_text(found, str(data), list(teachers), student)
    recipe = path.with_name(f"{path.name}.yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    write_text(recipe, written)
    print(f"{written}Written to {recipe}.")
    return run_recipe(load_recipe(recipe, overrides), path)
