"""Models beyond the machine's memory are refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModel
from typer.testing import CliRunner

from ds_distill.check import recipe as checks
from ds_distill.check.machine_memory import fewest_parameters, memory_mistakes
from ds_distill.cli import app
from ds_distill.errors import UserError
from ds_distill.launch import launch
from ds_distill.launch.options import LaunchOptions
from ds_distill.launch.probe import Answer
from ds_distill.models.configuration import load_config
from ds_distill.models.student import student_of
from ds_distill.planning.models import shipped_configs
from ds_distill.process.machine import machine_memory
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.recipe.load import validate
from ds_distill.run.folder import RunFolder


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_the_count_is_a_little_too_small(name):
    config = load_config(str(shipped_configs()[name]))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert 0.85 * real < fewest_parameters(config) < real


def configs(recipe):
    models = {"student": recipe.student.model}
    models |= {f"teachers.{name}": teacher.model for name, teacher in recipe.teachers.items()}
    found = {where: load_config(str(shipped_configs()[model])) for where, model in models.items()}
    return {**found, "student": student_of(found["student"], recipe.student)}


def test_a_phase_is_named_with_what_it_takes():
    recipe = load_recipe("large-teachers")
    found = list(memory_mistakes(recipe, configs(recipe), 5_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.teach"]
    # Three teachers of 300 to 430 million parameters at 2 bytes, a student at 16.
    found = list(memory_mistakes(recipe, configs(recipe), 3_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.teach", "phases.distil"]
    assert "this machine has 3.0 GB of memory" in found[1]
    assert "phases.distil.teachers=cached" in found[1] and "=cached" not in found[0]
    cached = load_recipe("large-teachers", ["phases.distil.teachers=cached"])
    found = list(memory_mistakes(cached, configs(cached), 3_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.teach"]
    assert not list(memory_mistakes(recipe, configs(recipe), 64_000_000_000))


def test_a_model_that_a_phase_saved_under_another_name_has_the_size_of_its_start():
    """It was counted as none."""
    starts = {"fine-tune": {"models": "base", "save_as": "again", "name": "again"}}
    first = {"fine-tune": {"models": "bert", "save_as": "base", "name": "first"}}
    model = {"model": "google-bert/bert-base-uncased"}
    recipe = validate(
        Recipe,
        {
            "name": "memory",
            "task": {"data": {"path": "data"}},
            "teachers": {"bert": model},
            "student": model,
            "phases": [first, starts],
        },
    )
    found = list(memory_mistakes(recipe, configs(recipe), 1_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.first", "phases.again"]
    assert found[0].split("alone take")[1] == found[1].split("alone take")[1]


@pytest.mark.parametrize(("deepspeed", "whole"), [("zero1_fp32", True), ("zero3_fp32", False)])
def test_ranks_that_do_not_fit_beside_each_other_are_told(deepspeed, whole):
    """Each was judged as if it were alone, and 64 began on a machine that holds a few."""
    recipe = load_recipe("large-teachers", [f"deepspeed={deepspeed}"])
    models = configs(recipe)
    assert not list(memory_mistakes(recipe, models, 30_000_000_000, ranks_here=2, ranks=2))
    found = list(memory_mistakes(recipe, models, 25_000_000_000, ranks_here=64, ranks=64))
    assert any(mistake.startswith("phases.distil: 64 ranks and its models") for mistake in found)
    assert all("Start fewer ranks, take a machine" in mistake for mistake in found)
    # Without what the stage spreads over them: of 16 ranks at stage 3 the processes take most.
    found = list(memory_mistakes(recipe, models, 30_000_000_000, ranks_here=16, ranks=16))
    assert bool(found) is whole
    # Half of the ranks are on another host.
    of_one = list(memory_mistakes(recipe, models, 8_000_000_000, ranks_here=8, ranks=64))
    assert bool(of_one) is whole


def test_the_machine_has_memory():
    assert 1e9 < machine_memory() < 1e14


def test_a_login_node_does_not_refuse_what_its_nodes_can_do(toy_recipe, tmp_path, monkeypatch):
    """It was judged by its own memory, whatever the machines of the run have."""
    monkeypatch.setattr(checks, "machine_memory", lambda: 1000)
    command = ["launch", str(toy_recipe), "--folder", str(tmp_path / "run"), "--num-gpus", "2"]
    with pytest.raises(UserError, match=r"this machine has 0\.0 GB"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    done = CliRunner().invoke(app, [*command, "--slurm", "--nodes", "2"], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.startswith("#!/bin/bash")


def test_hosts_are_judged_by_the_memory_that_they_answer(toy_recipe, tmp_path, monkeypatch):
    recipe = load_recipe(toy_recipe)
    options = LaunchOptions(hostfile=Path("hosts"))
    hosts = {"one": [0], "two": [0]}
    run = RunFolder(tmp_path / "run")
    work = launch.Work(recipe, ["toy.yaml"], run, [], [], False, [], run.results)
    order = launch._order(work, options, hosts, "launched")
    large = Answer(0, memory=10**12, gpus=0)

    def prepare(second: Answer) -> None:
        monkeypatch.setattr(launch, "examine", lambda *_: [large, second])
        launch._prepare(work, options, order)

    prepare(replace(large, node_rank=1))
    prepare(Answer(1, memory=1000, gpus=1))  # its GPUs' memory counts, which a plan knows
    with pytest.raises(UserError, match=r"phases\.teach-first: .* and two has 0\.0 GB") as refused:
        prepare(Answer(1, memory=1000, gpus=0))
    assert "one has" not in str(refused.value)
