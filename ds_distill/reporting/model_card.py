"""The model card (README.md) of the shipped student, in the format of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download, metadata_load

from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.process.terminal import escaped as visible
from ds_distill.recipe.data import Data, SplitFrom, source_of
from ds_distill.recipe.references import DATA_FOLDER, resolve_model
from ds_distill.recipe.schema import Recipe, Student
from ds_distill.recipe.tasks import TASKS, TaskSettings
from ds_distill.recipe.text import one_line
from ds_distill.records import EvaluationRecord
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
    task = recipe.tasks_by_name[results["task"]]
    judged = {name: _evaluation(recipe, results, name) for name in recipe.tasks_by_name}
    own = judged.pop(results["task"])
    elsewhere = [one for one in judged.values() if one is not None and own is None]
    environment = results["environment"]
    packages = ", ".join(f"{name} {v}" for name, v in environment["packages"].items() if v)
    card = ModelCard.from_template(
        _metadata(recipe, task, results, own),
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        title=f"{recipe.name}: student {_code(results['student'])}",
        result=_plain(results["verdict"]) if own else _no_evaluation(results, elsewhere),
        usage="\n".join(how_to_load(task, results)),
        made=list(_how_it_was_made(recipe, task, results)),
        sections=[_section(one, results) for one in ([own] if own else elsewhere)],
        versions=f"ds_distill {environment['ds_distill']}, {packages}.",
        plain=_plain,
    )
    return f"{card}\n"


def how_to_load(task: TaskSettings, results: dict[str, Any]) -> list[str]:
    """Lines of Python that read the shipped student, in its folder, and ask it."""
    on_pairs = any(
        model["output"] == results["student"] and model.get("pairs", False)
        for model in trained_models(results)
    )
    return task.usage(on_pairs).splitlines()


# ----------------------------------------------------------------------------- its figures


def _evaluation(recipe: Recipe, results: dict[str, Any], task: str) -> EvaluationRecord | None:
    """The last evaluation of the shipped student on a split of a task that no phase has used."""
    phases = list(recipe.phases_of(task))
    used = {split for phase in phases for split in phase.learns_from}
    if any(phase.outputs for phase in phases):
        used.add(CHOOSING_SPLIT)  # it chooses epochs and students
    found = evaluations_of_student(results)
    unused = [one for one in found if one["task"] == task and one["split"] not in used]
    return unused[-1] if unused else None


def _no_evaluation(results: dict[str, Any], elsewhere: list[EvaluationRecord]) -> str:
    if elsewhere:
        tasks = ", ".join(_plain(evaluation["task"]) for evaluation in elsewhere)
        return f"It was evaluated on other tasks than its own: {tasks}. Their figures are below."
    splits = [record["split"] for record in records_of(results, "evaluation")]
    why = "No evaluate phase came after it"
    if splits:
        why = f"It was evaluated only on data that was used to make it ({', '.join(splits)})"
    return f"{why}, so this card has no figures."


def _section(evaluation: EvaluationRecord, results: dict[str, Any]) -> dict[str, Any]:
    """All models, on examples that made none of this run's."""
    of_task = "" if evaluation["task"] == results["task"] else f", task {evaluation['task']}"
    trained = {model["output"] for model in trained_models(results)}
    models = evaluation["models"].items()
    teachers = [name for name, one in models if one["role"] == "teacher" and name not in trained]
    names = ", ".join(map(_plain, teachers))
    unknown = f" Whether {names} had seen it is not known here: trained elsewhere."
    title = f"{task_metric_of(evaluation).heading()} on {evaluation['split']}{of_task}"
    tables = list(evaluation_tables(evaluation, results["student"]))
    return {"title": _plain(title), "unknown": unknown if names else "", "tables": tables}


# -------------------------------------------------------------------------------- metadata


def _metadata(
    recipe: Recipe, task: TaskSettings, results: dict[str, Any], evaluation: EvaluationRecord | None
) -> ModelCardData:
    figures: dict[str, Any] = {}
    if evaluation is not None:
        own = evaluation["models"][results["student"]]
        metrics = [one for one in metrics_of(evaluation).values() if one.hub_name]
        figures["metrics"] = list(dict.fromkeys(metric.hub_name for metric in metrics))
        figures["model_name"] = recipe.name
        figures["eval_results"] = [
            EvalResult(
                task_type=TASKS[task.type].pipeline,
                **_split_on_hub(task, evaluation["split"]),
                metric_type=metric.hub_name or "",
                metric_name=metric.heading(),
                metric_value=round(own[metric.name], 4),
            )
            for metric in metrics
            if own[metric.name] is not None
        ]
    student = recipe.student
    is_named = not student.is_random and _is_on_hub(student.model)
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=TASKS[task.type].pipeline,
        tags=["knowledge-distillation", "ds-distill"],
        base_model=student.model if is_named else None,
        datasets=[path for path in _paths(task) if _is_hub_data(path)] or None,
        **figures,
        **_inherited(recipe),
    )


def _inherited(recipe: Recipe) -> dict[str, Any]:
    """Licence and language from the card of the student's initial model; empty where it has none or
    cannot be read, or is none of whose weights the student has some."""
    student = recipe.student
    if student.is_random:
        return {}
    reference = resolve_model(student.model, recipe.models_folder)
    try:
        card = Path(reference) / "README.md"
        if not card.parent.is_dir():
            given: dict[str, Any] = {"revision": student.revision, "etag_timeout": 5.0}
            card = Path(hf_hub_download(reference, "README.md", **given))
        metadata = metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}

    def is_plain(value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        return bool(values) and all(isinstance(item, str) for item in values)

    return {key: metadata[key] for key in _INHERITED if is_plain(metadata.get(key))}


def _split_on_hub(task: TaskSettings, split: str) -> dict[str, Any]:
    """What the hub's results say of the data of a split; those of several are no data set of its
    own."""
    of_split: Sequence[Data | SplitFrom] = task.data.splits_from().get(split, [task.data])
    first, paths = of_split[0], list(dict.fromkeys(part.path for part in of_split))
    if isinstance(first, Data):
        split = task.data.own_splits().get(split, split)
    elif len(of_split) == 1:
        split = first.split or "train"
    from_hub = len(paths) == 1 and _is_hub_data(first.path)
    return {
        "dataset_type": first.path if from_hub else "local",
        "dataset_name": ", ".join(map(_name_of_data, paths)),
        "dataset_config": first.config if from_hub else None,
        "dataset_split": split,
    }


# ------------------------------------------------------------------------------------ text


def _how_it_was_made(
    recipe: Recipe, task: TaskSettings, results: Mapping[str, Any]
) -> Iterator[str]:
    """Paragraphs."""
    own, *others = (_code(_name_of_data(path)) for path in _paths(task))
    if _is_hub_data(task.data.path) and task.data.config:
        own += f" ({_code(task.data.config)})"
    yield f"{_start(recipe.student)}; data: {', '.join([own, *others])}."
    if recipe.teachers:
        what = {name: _model(model) for name, model in recipe.encoders.items()}
        what |= {n: f"predictions in {_code(Path(f).name)}" for n, f in recipe.from_files.items()}
        yield f"Teachers: {', '.join(f'{name} ({what[name]})' for name in recipe.teachers)}."
        for teacher, why in left_out(results).items():
            yield f"Left out: {teacher}, which {_plain(why)}."
    if followed := sorted(recipe.followed - {*recipe.teachers}):
        yield f"Trained on the way, and teachers then: {', '.join(map(_code, followed))}."


def _start(student: Student) -> str:
    """What the student is before any training."""
    keys = {"layers", "config", "start"}
    given = student.model_dump(mode="json", include=keys, exclude_none=True)
    how = f", {one_line(given)[1:-1]}" if given else ""
    weights = "random weights, as " if student.is_random else ""
    return f"Starts from {weights}{_model(student.model)}{how}"


def _model(reference: str) -> str:
    if _is_on_hub(reference) or reference.startswith("pkg:"):
        return _code(reference)
    return f"the local folder {_code(Path(reference).name)}"


def _paths(task: TaskSettings) -> list[str]:
    """Where a task's data come from, each once: its own first, then those of single splits."""
    parts = [part for split in task.data.splits_from().values() for part in split]
    return list(dict.fromkeys([task.data.path, *(part.path for part in parts)]))


def _name_of_data(path: str) -> str:
    if path.startswith(DATA_FOLDER):
        return path.removeprefix(DATA_FOLDER)
    if source_of(path).part_name == "files":  # which may have gone by now
        return Path(path).expanduser().resolve().name
    return path


def _is_hub_data(path: str) -> bool:
    return not path.startswith(DATA_FOLDER) and source_of(path).part_name == "hub"


def _is_on_hub(reference: str) -> bool:
    """Whether a model's reference is a hub id, as for `resolve_model`."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", reference) is not None
    return is_name and not Path(reference).expanduser().is_dir()


def _plain(text: str) -> str:
    """A text for a line or a cell of a table: no HTML, which strangers' labels may hold."""
    return escape(" ".join(visible(text).split()), quote=False).replace("|", r"\|")


def _code(text: str) -> str:
    return f"`{' '.join(visible(text).split())}`"
