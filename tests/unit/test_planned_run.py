"""The plan of a run on GPUs: the warning before it starts, and the plan beside the truth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from ds_distill.files import write_json
from ds_distill.planning.gpus import GPUS, Device
from ds_distill.planning.planner import Planner
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.run import execute as execute_module
from ds_distill.run.folder import RunFolder
from ds_distill.run.plan import plan_and_truth, plan_run, planned_device
from ds_distill.run.run_recipe import run_recipe


@pytest.fixture
def recipe(tmp_path: Path, toy_settings: dict[str, Any]) -> Recipe:
    """A training on labels, and a distillation."""
    file = tmp_path / "toy.yaml"
    phases = [
        {"fine-tune": {"name": "teach", "models": list(toy_settings["teachers"]), "steps": 8}},
        {"distil": {"teachers": "live", "losses": {"kl": {}}, "steps": 8, "split": "transfer"}},
    ]
    logging = {"every": 4}
    file.write_text(yaml.safe_dump({**toy_settings, "phases": phases, "logging": logging}))
    return load_recipe(file)


def notes(recipe: Recipe, device: Device, folder: Path) -> list[str]:
    said: list[str] = []
    log: Any = SimpleNamespace(info=said.append)
    plan_run(recipe, RunFolder(folder), device, 1, log)
    return said


@pytest.mark.further
def test_what_does_not_fit_is_said_before_it_starts(recipe: Recipe, tmp_path: Path) -> None:
    roomy = GPUS["l4"]
    assert notes(recipe, roomy, tmp_path) == []
    [teach, *_] = json.loads((tmp_path / "plan.json").read_text())["trainings"]
    enough = int(teach["planned_bytes"] / (1 - roomy.reserve)) + 1
    # So little that the batch does not fit, while a part of it does.
    tight = notes(recipe, replace(roomy, memory=enough - 300_000), tmp_path)
    assert tight and "phase teach may not fit: planned are" in tight[0]
    assert "A micro_batch_size of " in tight[0]
    none = notes(recipe, replace(roomy, memory=1000), tmp_path)
    assert "`ds-distill plan` shows what would" in none[0]


def test_a_resumed_run_is_planned_by_its_settings_of_now(recipe: Recipe, tmp_path: Path) -> None:
    """What is done keeps its plan: also where the run goes on on other GPUs."""
    notes(recipe, GPUS["l4"], tmp_path)
    first = json.loads((tmp_path / "plan.json").read_text())["trainings"]
    folder, names = RunFolder(tmp_path), recipe.phase_names()
    done = {"phase": names[0], "kind": "fine-tune", "task": "task", "seconds": 1.0}
    write_json(folder.record(0, names[0]), done)
    training = recipe.training.model_copy(update={"micro_batch_size": 1})
    phases = [phase.model_copy(update={"micro_batch_size": 1}) for phase in recipe.phases]
    smaller = recipe.model_copy(update={"training": training, "phases": phases})
    assert notes(smaller, replace(GPUS["h200"], memory=1000), tmp_path)[0].startswith(
        f"Note: phase {names[1]} may not fit"
    )
    now = json.loads((tmp_path / "plan.json").read_text())["trainings"]
    assert now[:-1] == first[:-1]  # the teachers'
    assert now[-1]["planned_bytes"] < first[-1]["planned_bytes"]
    assert (first[-1]["device"], now[-1]["device"]) == (GPUS["l4"].name, GPUS["h200"].name)


def test_a_run_that_cannot_be_planned_starts_all_the_same(recipe: Recipe, tmp_path: Path) -> None:
    elsewhere = recipe.student.model_copy(update={"model": str(tmp_path / "nowhere")})
    [note] = notes(recipe.model_copy(update={"student": elsewhere}), GPUS["l4"], tmp_path)
    assert note.startswith("Note: there is no plan.")
    assert plan_and_truth(recipe, RunFolder(tmp_path), []) is None


def test_a_model_that_planning_fails_on_is_trained_all_the_same(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Planner) -> None:
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr(Planner, "plan", fails)
    [note] = notes(recipe, GPUS["l4"], tmp_path)
    assert note == "Note: there is no plan. NotImplementedError: no meta kernel"


def test_a_cpu_run_has_no_plan() -> None:
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    assert planned_device(world) is None


@pytest.mark.further
def test_results_have_the_plan_beside_the_truth(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_module, "planned_device", lambda world: GPUS["l4"])
    results = run_recipe(recipe, tmp_path / "run").results
    trainings = results["plan"]["trainings"]
    trained = [
        (phase["phase"], one["output"]) for phase in results["phases"] for one in phase["trained"]
    ]
    assert [(one["phase"], one["model"]) for one in trainings] == trained
    for one in trainings:
        assert one["planned_bytes"] > 0 and one["planned_step_seconds"] > 0
        assert one["step_seconds"] > 0
        assert one["peak_bytes"] is None  # of a GPU's allocator
