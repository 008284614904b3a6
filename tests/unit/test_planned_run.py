"""What a run on GPUs is planned to hold: the warning before it starts, and its results."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from runs import loaded

from ds_distill.files import write_json
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner
from ds_distill.run.folder import RunFolder
from ds_distill.run.memory import planned_device, planned_memory


@pytest.fixture
def recipe(tmp_path, toy_settings):
    """A training on labels, and a distillation."""
    phases = [
        {"fine-tune": {"name": "teach", "models": list(toy_settings["teachers"]), "steps": 8}},
        {"distil": {"teachers": "live", "losses": {"kl": {}}, "steps": 8, "split": "transfer"}},
    ]
    return loaded({**toy_settings, "phases": phases, "logging": {"every": 4}}, tmp_path)


def notes(recipe, device, folder):
    """What is told of a plan, and the planned bytes of each training."""
    told = []
    log = SimpleNamespace(info=told.append)
    planned = planned_memory(recipe, RunFolder(folder), device, 1, log)
    return told, list(planned.values())


def test_what_is_done_is_not_planned_again(recipe, tmp_path):
    folder, names = RunFolder(tmp_path), recipe.phase_names()
    _, first = notes(recipe, GPUS["l4"], tmp_path)
    write_json(folder.record(0, names[0]), {})
    told, [left] = notes(recipe, replace(GPUS["l4"], memory=1000), tmp_path)
    assert [line.split(" may not fit")[0] for line in told] == [f"Note: phase {names[1]}"]
    assert left == first[-1]
    write_json(folder.record(1, names[1]), {})
    assert notes(recipe, GPUS["l4"], tmp_path) == ([], [])


def test_what_cannot_be_planned_is_trained_all_the_same(recipe, tmp_path, monkeypatch):
    elsewhere = recipe.student.model_copy(update={"model": str(tmp_path / "nowhere")})
    missing = recipe.model_copy(update={"student": elsewhere})
    [note], _ = notes(missing, GPUS["l4"], tmp_path)
    assert note.startswith("Note: there is no plan.")

    def fails(self):
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr(Planner, "plan", fails)
    told = notes(recipe, GPUS["l4"], tmp_path)
    assert told == (["Note: there is no plan. NotImplementedError: no meta kernel"], [])


def test_a_cpu_run_has_no_plan():
    world = SimpleNamespace(device=torch.device("cpu"))
    assert planned_device(world) is None
