"""A run that is killed and resumed ends with the same weights, bit for bit, as one left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import (
    Runs,
    after_steps,
    curves,
    digests,
    others,
    records,
)

# -------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def make_runs(
    tmp_path_factory: pytest.TempPathFactory,
    toy_settings: dict[str, Any],
    command_environment: dict[str, str],
) -> Callable[[int | None], Runs]:
    recipe = tmp_path_factory.mktemp("recipe") / "toy.yaml"
    recipe.write_text(yaml.safe_dump(toy_settings, sort_keys=False))
    return lambda ranks: Runs(recipe, command_environment, ranks)


@pytest.fixture(scope="module")
def whole(make_runs: Callable[..., Runs], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    make_runs(None).finish(folder)
    assert len(curves(folder)) == len(set(curves(folder))) > 100
    return folder


def test_a_killed_masked_lm_training_ends_as_if_left_alone(
    masked_lm_settings, command_environment, ds_distill, tmp_path
):
    """Masks are drawn anew in every epoch, and the same again after a resume."""
    recipe = tmp_path / "masked-lm.yaml"
    teacher = masked_lm_settings["teachers"]["bert"]
    routing = {"policy": "average", "mix": "losses"}
    settings = {
        **masked_lm_settings,
        "teachers": {"bert": teacher, "other": teacher},
        "phases": [
            {"fine-tune": {"models": ["bert", "other"]}},
            {"distil": {"losses": {"kl": {"temperature": 2.0}}, "routing": routing}},
        ],
    }
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False))
    runs = Runs(recipe, command_environment, None)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    done = ds_distill(*runs.arguments, "--folder", whole)
    assert done.returncode == 0, done.stderr
    teachers = sum(event[1] != "student" for event in curves(whole))
    assert runs.kill(folder, after_steps(teachers + 20, 0.0), resume=False), "ended too early"
    assert len(records(folder)) == 1, "killed outside of the student's training"
    done = ds_distill(*runs.arguments, "--folder", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert len(digests(whole)) == 4  # two teachers, the student, and again as it is shipped
    assert digests(folder) == digests(whole)
    assert curves(folder) == curves(whole)
    assert others(folder) == others(whole)
