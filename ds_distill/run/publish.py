"""Publish a run: the student to ship, results, report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.files import new_folder, read_json, write_json, write_text
from ds_distill.models.task_params import KEY
from ds_distill.recipe import Recipe, dump_recipe
from ds_distill.recipe.lineage import shippable
from ds_distill.recipe.tasks import TASKS, TaskSettings, metric_of
from ds_distill.reporting.model_card import how_to_load, model_card
from ds_distill.reporting.report import curves, report
from ds_distill.reporting.result_tables import verdict
from ds_distill.reporting.results import uses
from ds_distill.run.events import RunLog, read_events
from ds_distill.run.folder import RunFolder
from ds_distill.run.speed import quick_speed


def publish(recipe: Recipe, folder: RunFolder, device: torch.device, log: RunLog) -> None:
    """Write student/, results.json and report.html. Main process only; device: its own."""
    records = folder.records(recipe)
    chosen = choose_student(recipe, records)
    results = _results(recipe, folder, records)
    results["student"] = chosen[1] if chosen else None
    results["task"] = recipe.task_name(recipe.phases[chosen[0] if chosen else -1])
    if (speed := quick_speed(recipe, folder, results, device, log)) is not None:
        results["speed"] = speed
    results["verdict"] = verdict(results)
    if chosen is not None:
        number, output = chosen
        if len(shippable(recipe, CHOOSING_SPLIT)) > 1:
            log.info(
                f"Shipped: {output}, of the students the best on the examples that choose, or the "
                "last where those have no score."
            )
        with new_folder(folder.student) as temporary:
            shutil.copytree(folder.model(number, output), temporary, dirs_exist_ok=True)
            write_text(temporary / "README.md", model_card(recipe, results))
            task = recipe.tasks_by_name[recipe.task_name(recipe.phases[number])]
            keep_settings(temporary, task)
    write_json(folder.results, results)
    write_report(recipe, folder, results)
    log.info(results["verdict"])


def _results(recipe: Recipe, folder: RunFolder, records: list[Any]) -> dict[str, Any]:
    """What results.json says of the phases that are done."""
    results: dict[str, Any] = {
        "run": recipe.name,
        "description": recipe.description,
        "student": None,
        "task": recipe.task_name(recipe.phases[-1]),
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "uses": uses(recipe, records),
        "phases": records,
        "environment": folder.read_environment(),
    }
    if scores := folder.read_teacher_scores():
        results["teacher_scores"] = scores
    return results


def write_report(recipe: Recipe, folder: RunFolder, results: dict[str, Any]) -> None:
    """Write report.html, and its figures to figures/."""
    metrics = [metric_of(recipe.task_of(phase)) for phase in recipe.phases]
    events = folder.path / "metrics.jsonl"
    found = (event for _, event in read_events(events)) if events.is_file() else iter(())
    learnt = curves(found, recipe.phase_names(), metrics)
    task = recipe.tasks_by_name[results["task"]]
    loading = how_to_load(task, results) if results["student"] is not None else []
    page = report(results, learnt, loading=loading, recipe=dump_recipe(recipe))
    write_text(folder.report, page.html())
    figures = folder.path / "figures"
    for old in figures.glob("[0-9]*.svg"):  # of an earlier page, such as that of a stop
        old.unlink()
    for name, figure in page.figures():
        write_text(figures / name, figure)


def report_stopped(recipe: Recipe, folder: RunFolder, why: str) -> None:
    """Write the report of a run that has not finished: where it stopped, and what its phases found
    until then."""
    names, records = recipe.phase_names(), folder.records(recipe)
    where = f"in phase {names[len(records)]}" if len(records) < len(names) else "at its end"
    results = _results(recipe, folder, records)
    results["verdict"] = (
        f"The run stopped {where}, after {len(records)} of {len(names)} phases. {why} "
        "Below is what the phases before it found."
    )
    write_report(recipe, folder, results)


def keep_settings(model: Path, task: TaskSettings) -> None:
    """Write what a saved model is to be read with, as the evaluation did: the tokenizer cuts, where
    it is asked to, at the length of the training; the configuration has the task's `reading`."""
    tokenizer, config = model / "tokenizer_config.json", model / "config.json"
    write_json(tokenizer, {**read_json(tokenizer), "model_max_length": task.max_length})
    if task.reading:
        params = {TASKS[task.type].pipeline: task.reading}
        write_json(config, {**read_json(config), KEY: params})


def choose_student(recipe: Recipe, records: list[Any]) -> tuple[int, str] | None:
    """(phase number, name) of the student to ship: of those that are `shippable` the best on the
    choosing examples, by its task's metric. Of equals the first is taken, and without choosing
    examples the last."""
    candidates = shippable(recipe, CHOOSING_SPLIT)
    if not candidates:
        return None
    scores = {
        (number, model["output"]): model["choosing"]["score"]
        for number, record in enumerate(records)
        for model in record.get("trained", [])
        if model["choosing"] is not None and model["choosing"]["score"] is not None
    }
    known = {one: scores[one] for one in candidates if one in scores}
    if not known:
        return candidates[-1]
    metric = metric_of(recipe.task_of(recipe.phases[candidates[-1][0]]))
    best: tuple[int, str] = metric.best(known)
    return best
