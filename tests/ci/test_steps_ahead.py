"""Teachers that read several steps at once, beside those that read step by step."""

import pytest
from processes import events
from unit.test_steps_ahead import heard, recipe_of  # noqa: F401

from ds_distill import load_recipe, run_recipe
from ds_distill.engine import config as config_of_engine
from ds_distill.engine.config import STEPS_AHEAD

pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.mark.parametrize("config", ["zero0_fp32", "zero3_fp32"])
def test_losses_are_those_of_teachers_that_read_step_by_step(
    toy_settings, tmp_path, heard, monkeypatch, config
):
    """Over 50 steps. What a teacher says differs in the last digits by what it reads together, and
    a training carries that on: hence the second bound."""
    found = []
    for ahead in (STEPS_AHEAD, 1):
        monkeypatch.setattr(config_of_engine, "STEPS_AHEAD", ahead)
        more = ["training.epochs=5", "logging.every=1", f"deepspeed={config}"]
        recipe = load_recipe(recipe_of(toy_settings, tmp_path), more)
        run_recipe(recipe, tmp_path / str(ahead))
        steps = (one for one in events(tmp_path / str(ahead)) if one["event"] == "train")
        found.append([step["loss"] for step in steps])
    assert heard == [8, 2] * 5, "the other run's steps begin with their own"
    own, expected = found
    assert len(own) == len(expected) == 50
    assert own[:10] == pytest.approx(expected[:10], rel=0, abs=1e-5)
    assert own == pytest.approx(expected, rel=0, abs=1e-4)
