"""The model card (README.md) of the shipped student, in the format of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData, hf_hub_download, metadata_load

from ds_distill.data.validation_split import CHOOSING_SPLIT
from ds_distill.process.terminal import escaped as visible
from ds_distill.recipe.data import Data, SplitFrom
from ds_distill.recipe.references import DATA_FOLDER, resolve_model
from ds_distill.recipe.schema import Recipe, Student
from ds_distill.recipe.sources import source_of
from ds_distill.recipe.tasks import TASKS, TaskSettings
from ds_distill.reporting.result_tables import evaluation_tables
from ds_distill.reporting.results import (
    evaluations_of_student,
    left_out,
    metrics_of,
    records_of,
    task_metric_of,
    trained_models,
)

_INHERITED = ("license", "license_name", "license_link", "language")
"""Metadata that a student inherits from the model that it starts from."""


def model_card(recipe: Recipe, results: dict[str, Any]) -> str:
    """The card as Markdown, with the hub's metadata block.

    Figures come from the last evaluation on a split that no phase used to train, fit or choose, or
    where there is none, from such evaluations of other tasks; else the card has none. Licence and
    language are those of the model that the student starts from, if its own card has them. Of a
    local folder the card has only the name, not the path.
    """
    evaluation = _evaluation(recipe, results, results["task"])
    elsewhere = [] if evaluation else _elsewhere(recipe, results)
    student, task = recipe.student, _task(recipe, results)
    lines = [
        "---",
        _metadata(recipe, results, evaluation).to_yaml(),
        "---",
        "",
        f"# {recipe.name}: student {_code(results['student'])}",
        "",
        _escaped(results["verdict"]) if evaluation else _no_evaluation(results, elsewhere),
        "",
        "Run in this folder (elsewhere, use its path or its hub id):",
        "",
        "```python",
        *how_to_load(task, results),
        "```",
        "",
        "Weights are float32; figures come from predictions in float32.",
        "",
        "## How it was made",
        "",
        f"{_start(student)}; data: {_data(task)}.",
    ]
    if recipe.teachers:
        what = {name: _model(model) for name, model in recipe.encoders.items()}
        what |= {n: f"predictions in {_code(Path(f).name)}" for n, f in recipe.from_files.items()}
        teachers = ", ".join(f"{name} ({what[name]})" for name in recipe.teachers)
        lines += ["", f"Teachers: {teachers}."]
        for teacher, why in left_out(results).items():
            lines += ["", f"Left out: {teacher}, which {_escaped(why)}."]
    if followed := sorted(recipe.followed - {*recipe.teachers}):
        lines += ["", f"Trained on the way, and teachers then: {', '.join(map(_code, followed))}."]
    for judged in [evaluation] if evaluation else elsewhere:
        of_task = "" if judged["task"] == results["task"] else f", task {_escaped(judged['task'])}"
        title = f"## {task_metric_of(judged).heading()} on {judged['split']}{of_task}"
        lines += ["", title, *_tables(judged, results)]
    environment = results["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["packages"].items() if v)
    lines += ["", "## Versions", "", f"ds_distill {environment['ds_distill']}, {versions}."]
    return "\n".join(lines) + "\n"


def how_to_load(task: TaskSettings, results: dict[str, Any]) -> list[str]:
    """Lines of Python that read the shipped student, in its folder, and ask it."""
    usage = TASKS[task.type].usage(task, _trained_on_pairs(results))
    return [f"from transformers import {TASKS[task.type].imports}", "", *usage]


def _start(student: Student) -> str:
    """What the student is before any training."""
    if student.config is not None:
        sizes = student.config.model_dump(exclude_none=True)
        of_its_own = ", ".join(f"{key} {size}" for key, size in sizes.items()) or "the same sizes"
        if not student.is_random:
            of = f"layers {student.layers}" if student.layers else "its first layers"
            return (
                f"Starts from parts of the weights of {_model(student.model)}: {of_its_own}, {of}"
            )
        return f"Starts from random weights, as {_model(student.model)} with {of_its_own}"
    return f"Starts from {_model(student.model)}" + (
        f", layers {student.layers}" if student.layers else ""
    )


# -------------------------------------------------------------------------------- metadata


def _base_model(student: Student) -> str | None:
    """The hub id of the model whose weights the student starts from."""
    return student.model if not student.is_random and _is_on_hub(student.model) else None


def _metadata(
    recipe: Recipe, results: dict[str, Any], evaluation: dict[str, Any] | None
) -> ModelCardData:
    task = _task(recipe, results)
    hub_data = [path for path in _paths(task) if _is_hub_data(path)]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=TASKS[task.type].pipeline,
        tags=["knowledge-distillation", "ds-distill"],
        base_model=_base_model(recipe.student),
        datasets=hub_data or None,
        metrics=_hub_metrics(evaluation) if evaluation else None,
        model_name=recipe.name if evaluation else None,
        eval_results=_eval_results(recipe, results, evaluation) if evaluation else None,
        **_inherited(recipe),
    )


def _inherited(recipe: Recipe) -> dict[str, Any]:
    """Licence and language from the card of the student's initial model; empty where it has none or
    cannot be read, or is none of whose weights the student has some."""
    if recipe.student.is_random:
        return {}
    reference = resolve_model(recipe.student.model, recipe.models_folder)
    try:
        card = Path(reference) / "README.md"
        if not Path(reference).is_dir():
            revision = recipe.student.revision
            card = Path(
                hf_hub_download(reference, "README.md", revision=revision, etag_timeout=5.0)
            )
        metadata = metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}

    def is_plain(value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        return bool(values) and all(isinstance(item, str) for item in values)

    return {key: metadata[key] for key in _INHERITED if is_plain(metadata.get(key))}


def _hub_metrics(evaluation: dict[str, Any]) -> list[str]:
    metrics = metrics_of(evaluation).values()
    return list(dict.fromkeys(metric.hub_name for metric in metrics if metric.hub_name))


def _eval_results(
    recipe: Recipe, results: dict[str, Any], evaluation: dict[str, Any]
) -> list[EvalResult]:
    own = evaluation["models"][results["student"]]
    task = _task(recipe, results)
    judged_on = _split_on_hub(task, evaluation["split"])
    return [
        EvalResult(
            task_type=TASKS[task.type].pipeline,
            **judged_on,
            metric_type=metric.hub_name,
            metric_name=metric.heading(),
            metric_value=round(own[name], 4),
        )
        for name, metric in metrics_of(evaluation).items()
        if metric.hub_name and own[name] is not None
    ]


def _split_on_hub(task: TaskSettings, split: str) -> dict[str, Any]:
    """What the hub's results say of the data of a split; those of several are no data set of its
    own."""
    of_split = task.data.splits_from().get(split)
    first: Data | SplitFrom = task.data if of_split is None else of_split[0]
    paths = list(dict.fromkeys(part.path for part in of_split or ())) or [first.path]
    if of_split is None:
        split = task.data.own_splits().get(split, split)
    elif len(of_split) == 1:
        split = of_split[0].split or "train"
    from_hub = len(paths) == 1 and _is_hub_data(first.path)
    return {
        "dataset_type": first.path if from_hub else "local",
        "dataset_name": ", ".join(map(_name_of_data, paths)),
        "dataset_config": first.config if from_hub else None,
        "dataset_split": split,
    }


def _evaluation(recipe: Recipe, results: dict[str, Any], task: str) -> dict[str, Any] | None:
    """The last evaluation of the shipped student on a split of a task that no phase has used."""
    phases = list(recipe.phases_of(task))
    used = {split for phase in phases for split in phase.learns_from}
    if any(phase.outputs for phase in phases):
        used.add(CHOOSING_SPLIT)  # it chooses epochs and students
    found = [
        record
        for record in evaluations_of_student(results)
        if record["task"] == task and record["split"] not in used
    ]
    return found[-1] if found else None


def _elsewhere(recipe: Recipe, results: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of other tasks, as where a student of all types of entities is judged by type."""
    others = [task for task in recipe.tasks_by_name if task != results["task"]]
    found = [_evaluation(recipe, results, task) for task in others]
    return [evaluation for evaluation in found if evaluation is not None]


def _ready_teachers(results: dict[str, Any], evaluation: dict[str, Any]) -> list[str]:
    """Teachers in an evaluation that no phase has trained."""
    trained = {model["output"] for model in trained_models(results)}
    models = evaluation["models"].items()
    return [name for name, one in models if one["role"] == "teacher" and name not in trained]


def _no_evaluation(results: dict[str, Any], elsewhere: list[dict[str, Any]]) -> str:
    if elsewhere:
        tasks = ", ".join(_escaped(evaluation["task"]) for evaluation in elsewhere)
        return f"It was evaluated on other tasks than its own: {tasks}. Their figures are below."
    splits = [record["split"] for record in records_of(results, "evaluation")]
    why = "No evaluate phase came after it"
    if splits:
        why = f"It was evaluated only on data that was used to make it ({', '.join(splits)})"
    return f"{why}, so this card has no figures."


# ------------------------------------------------------------------------------------ text


def _task(recipe: Recipe, results: dict[str, Any]) -> TaskSettings:
    """The shipped student's task."""
    return recipe.tasks_by_name[results["task"]]


def _trained_on_pairs(results: dict[str, Any]) -> bool:
    """Whether the shipped student was trained on pairs of texts."""
    return any(
        model["output"] == results["student"] and model.get("pairs", False)
        for model in trained_models(results)
    )


def _unknown(ready: list[str]) -> str:
    """What is not known of teachers that came trained."""
    names = ", ".join(map(_escaped, ready))
    return f" Whether {names} had seen it is not known here: trained elsewhere." if ready else ""


def _tables(evaluation: dict[str, Any], results: dict[str, Any]) -> Iterator[str]:
    """All models, on examples that made none of this run's."""
    ready = _ready_teachers(results, evaluation)
    yield f"\nOn a split that was not used to make the models.{_unknown(ready)}"
    first, *rest = evaluation_tables(evaluation)
    for table in (first, *rest):
        title = f"### {_escaped(table.title)}\n\n" if table is not first else ""
        yield f"\n{title}{table.markdown(_escaped)}"
        yield f"\n{_escaped(' '.join(table.notes))}"


def _model(reference: str) -> str:
    if _is_on_hub(reference) or reference.startswith("pkg:"):
        return _code(reference)
    return f"the local folder {_code(Path(reference).name)}"


def _data(task: TaskSettings) -> str:
    own, *others = map(_code, map(_name_of_data, _paths(task)))
    named = task.data.config if _is_hub_data(task.data.path) else None
    config = f" ({_code(named)})" if named else ""
    return ", ".join([own + config, *others])


def _paths(task: TaskSettings) -> list[str]:
    """Where a task's data come from, each once: its own first, then those of single splits."""
    parts = [part for split in task.data.splits_from().values() for part in split]
    return list(dict.fromkeys([task.data.path, *(part.path for part in parts)]))


def _name_of_data(path: str) -> str:
    if path.startswith(DATA_FOLDER):
        return path.removeprefix(DATA_FOLDER)
    if source_of(path).name == "files":  # which may have gone by now
        return Path(path).expanduser().resolve().name
    return path


def _is_hub_data(path: str) -> bool:
    return not path.startswith(DATA_FOLDER) and source_of(path).name == "hub"


def _is_on_hub(reference: str) -> bool:
    """Whether a model's reference is a hub id, as for `resolve_model`."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", reference) is not None
    return is_name and not Path(reference).expanduser().is_dir()


def _escaped(text: str) -> str:
    """A text escaped for one line of Markdown, also in a table cell, where it is neither markup nor
    HTML, a link or an active character."""
    line = " ".join(visible(text).split())
    line = re.sub(r"[\\`*_{}\[\]<>()#+!|~&$@=^-]|[.:/](?=\w|/)", r"\\\g<0>", line)
    line = re.sub(r"^(\d+)\.", r"\1\\.", line)  # no item of a list
    return re.sub(r"(?<=\d)\\\.(?=\d)", ".", line)  # in a number: no link


def _code(text: str) -> str:
    """A code span, with one backtick more than the longest run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks, space = "`" * (longest + 1), " " if "`" in text else ""
    return f"{ticks}{space}{' '.join(visible(text).split())}{space}{ticks}"
