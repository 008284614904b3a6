"""The end of a run: the student to ship, results, report."""

from __future__ import annotations

import shutil
from typing import Any

from ds_distill.files import new_folder, read_json, write_json, write_text
from ds_distill.phases.run import Run
from ds_distill.recipe.phases import Distil
from ds_distill.reporting.model_card import model_card
from ds_distill.reporting.report import render_report
from ds_distill.reporting.verdict import verdict


def publish(run: Run) -> None:
    """Write student/, results.json and report.html. Main process only."""
    folder, recipe = run.folder, run.recipe
    records = [
        read_json(folder.record(number, name)) for number, name in enumerate(recipe.phase_names())
    ]
    chosen = choose_student(recipe.phases, records)
    results: dict[str, Any] = {
        "run": recipe.name,
        "description": recipe.description,
        "student": chosen[1] if chosen else None,
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "phases": records,
        "environment": read_json(folder.path / "environment.json"),
    }
    results["verdict"] = verdict(results)
    if chosen is not None:
        number, output = chosen
        with new_folder(folder.student) as aside:
            shutil.copytree(folder.model(number, output), aside, dirs_exist_ok=True)
            write_text(aside / "README.md", model_card(recipe, results))
    write_json(folder.results, results)
    write_text(folder.path / "report.html", render_report(results))
    run.log.say(results["verdict"])


def choose_student(phases: list[Any], records: list[Any]) -> tuple[int, str] | None:
    """(phase number, name) of the student to ship: of all distilled ones, else of all trained
    ones, the best on validation; the first of equals, and the last without validation."""
    trained = [
        (isinstance(phase, Distil), model["validation_accuracy"] or 0.0, number, model["output"])
        for number, (phase, record) in enumerate(zip(phases, records, strict=True))
        for model in record.get("trained", [])
    ]
    if any(model[0] for model in trained):
        trained = [model for model in trained if model[0]]
    if not trained:
        return None
    best = max(trained, key=lambda model: model[1])
    if best[1] == 0.0:
        best = trained[-1]
    return best[2], best[3]
