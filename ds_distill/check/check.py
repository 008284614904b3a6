"""Everything that can be wrong with a recipe, found before a model is loaded.

Each rule stands alone and all mistakes are reported together, without those that only follow from
another. Nothing here needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from transformers import PreTrainedConfig

from ds_distill.check.data import Data
from ds_distill.check.labels import label_mistakes
from ds_distill.check.models import Models, lacks_flashdeberta
from ds_distill.check.phases import phase_mistakes, shared_cache_mistakes
from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.data.open_source import open_source
from ds_distill.data.sources import Progress, Source
from ds_distill.engine.config import deepspeed_config
from ds_distill.errors import Mistake, UserError, collecting, refuse
from ds_distill.models.student import config_of
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import Step, shippable, steps, students, trained_on
from ds_distill.recipe.training import Training


def check_recipe(recipe: Recipe, num_ranks: int = 1, *, on_gpu: bool = False) -> None:
    """Phases, DeepSpeed config and the models' configurations, tokenizers and headers. Reads no
    data and no weights. Raises UserError with all that is wrong."""
    models = Models(recipe, on_gpu=on_gpu)
    refuse([*_settings(recipe, num_ranks), *models.mistakes()], recipe.location_of)


def check_settings(recipe: Recipe) -> None:
    """What needs neither models nor data, for one rank. Raises UserError with all that is wrong."""
    refuse(_settings(recipe, 1), recipe.location_of)


def check_data(recipe: Recipe, sources: Mapping[str, Source]) -> None:
    """The splits that phases use, their labels, and teachers' labels against the tasks', of a
    recipe that passed `check_recipe`. Raises UserError with all that is wrong.

    sources: by task.
    """
    teachers = _configurations(recipe)
    found = (one for data in _data(recipe, sources) for one in data.mistakes(teachers))
    refuse(found, recipe.location_of)


def open_sources(recipe: Recipe, progress: Progress | None = None) -> dict[str, Source]:
    """The source of each task's data, by task; see `open_source`. Raises UserError with all that is
    wrong."""
    found, mistakes = {}, list[Mistake]()
    for name, task in recipe.tasks_by_name.items():
        with collecting(mistakes):
            found[name] = open_source(task, progress=progress, data_folder=recipe.data_folder)
    refuse(mistakes, recipe.location_of)
    return found


def check_all(
    recipe: Recipe,
    progress: Progress | None = None,
    show: Callable[[str], None] | None = None,
) -> list[str]:
    """Both, for one rank; returns notes: what is no mistake, and better known before a run.

    progress: as of `open_source`. show: called with a line for each labelled split, which counts
        its classes. Raises UserError with all that is wrong.
    """
    models = Models(recipe, on_gpu=False)
    found = [*_settings(recipe, 1), *models.mistakes()]
    try:
        sources = open_sources(recipe, progress)
    except UserError as error:
        refuse([*found, *error.mistakes], recipe.location_of)
    of_tasks = _data(recipe, sources)
    teachers = models.teachers()
    found += (one for data in of_tasks for one in data.mistakes(teachers))
    refuse(found, recipe.location_of)
    if show is not None:
        for data in of_tasks:
            for line in data.class_lines():
                show(line)
    return [
        *trained_on_what_chooses(recipe),
        *ships_the_last(recipe, sources),
        *_padding_notes(recipe, models),
        *(note for data in of_tasks for note in data.notes(teachers)),
        *(note for data in of_tasks for note in data.cut_texts(models.student_tokenizer())),
    ]


def notes(recipe: Recipe, sources: Mapping[str, Source]) -> list[str]:
    """The notes of a run on a recipe without mistakes, before it starts; `check` looks further."""
    teachers = _configurations(recipe)
    of_tasks = _data(recipe, sources)
    return [
        *trained_on_what_chooses(recipe),
        *ships_the_last(recipe, sources),
        *(note for data in of_tasks for note in data.label_notes(teachers)),
    ]


def _data(recipe: Recipe, sources: Mapping[str, Source]) -> list[Data]:
    return [Data(recipe, name, sources) for name in sources]


def _configurations(recipe: Recipe) -> dict[str, PreTrainedConfig]:
    return {name: config_of(recipe, name) for name in recipe.encoders}


def _settings(recipe: Recipe, num_ranks: int) -> Iterator[Mistake]:
    yield from name_mistakes(recipe)
    yield from _ships_nobody(recipe)
    yield from phase_mistakes(recipe)
    yield from label_mistakes(recipe)
    yield from _logging_mistakes(recipe)
    yield from shared_cache_mistakes(recipe)
    for phase in recipe.phases:
        if isinstance(phase, Training):
            found: list[Mistake] = []
            with collecting(found):
                deepspeed_config(recipe.deepspeed, phase, num_ranks, for_device=False)
            yield from found


def name_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Models of the same name: of a teacher that is not trained anew, or of two trainings on a task
    of which one distils. Evaluations and the report tell models by name, and the student to ship is
    chosen among all trainings."""
    if "student" in recipe.teachers:
        yield Mistake("teachers.student", "`student` names the student. Rename the teacher.")
    left: dict[tuple[str, str], Step] = {}
    for step in steps(recipe):
        distils = step.phase.makes == "student"
        for output in step.phase.outputs:
            earlier = left.get((step.task_name, output))
            called = f"its model would be called {output!r}"
            if output in recipe.teachers and (distils or output not in step.phase.starts):
                yield Mistake(
                    step.location,
                    f"{called}, and a teacher has that name. Choose another with save_as, or "
                    "rename the teacher.",
                )
            elif earlier is not None and (distils or earlier.phase.makes == "student"):
                yield Mistake(
                    step.location,
                    f"{called}, as the one that {earlier.location} left: which of the two is "
                    "judged and which is shipped cannot be told by name. Give one of them another "
                    "with save_as.",
                )
            if step.phase.makes != "start":  # what is expanded is trained under the same name
                left[step.task_name, output] = step


def _ships_nobody(recipe: Recipe) -> Iterator[Mistake]:
    names = dict.fromkeys(model.name for _, model in students(recipe))
    if recipe.ships is not None and recipe.ships not in names:
        fix = f"Name one of {', '.join(names)}." if names else "Take it out: none is trained."
        yield Mistake(f"ships={recipe.ships}", f"no phase trains a student of this name. {fix}")


def _logging_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    if recipe.logging.tensorboard and find_spec("tensorboard") is None:
        yield Mistake(
            "logging.tensorboard=true",
            "the package tensorboard is not installed. Run pip install tensorboard, or set "
            "logging.tensorboard=false.",
        )
    if recipe.logging.wandb and os.environ.get("WANDB_MODE", "online") in ("online", "run"):
        import wandb

        if not wandb.login(prompt=False):
            yield Mistake(
                f"logging.wandb={recipe.logging.wandb}",
                "wandb has no API key here. Run `wandb login`, set WANDB_MODE=offline to keep the "
                "log in the run's folder, or take the key out.",
            )


# ------------------------------------------------------------ what is better known before a run


def trained_on_what_chooses(recipe: Recipe) -> list[str]:
    """A note where models are trained on the split that chooses."""
    tasks = recipe.tasks_by_name
    seen = list(
        dict.fromkeys(n for task in tasks for n in trained_on(recipe, task, CHOOSING_SPLIT))
    )
    if not seen:
        return []
    verb = "is" if len(seen) == 1 else "are"
    return [
        f"{', '.join(seen)} {verb} trained on split {CHOOSING_SPLIT!r}, by which epochs and the "
        "student to ship are chosen: accuracy on what a model was trained on says nothing of it. "
        "It is shipped only if there is no other student."
    ]


def ships_the_last(recipe: Recipe, sources: Mapping[str, Source]) -> list[str]:
    """A note where there are several students, and nothing chooses between them."""
    found = shippable(recipe, CHOOSING_SPLIT)
    if len(found) < 2:
        return []
    number, last = found[-1]
    source = sources[recipe.task_name(recipe.phases[number])]
    if CHOOSING_SPLIT in source.splits:
        return []
    return [
        f"the students are {', '.join(name for _, name in found)}, and there is no split "
        f"{CHOOSING_SPLIT!r} to choose by: the last, {last}, is shipped. ships=NAME says another."
    ]


def _padding_notes(recipe: Recipe, models: Models) -> Iterator[str]:
    if recipe.padding == "never":
        for location, config in models.configs.items():
            if lacks_flashdeberta(config):
                yield (
                    f"padding=never: on a GPU {location} ({config.model_type}) needs the package "
                    "flashdeberta, which is not installed."
                )
