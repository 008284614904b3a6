"""Every built-in recipe, whole: its tasks, phases, losses and policies as its file has them, with
toy models, generated data and a few steps in place of its own. A new recipe is run without being
named here."""

import pytest
import yaml
from e2e.test_recipes import Toys
from processes import events
from ranks import with_plants
from runs import results, written

from ds_distill.recipe import dump_recipe, load_recipe


def test_large_teachers_are_live_or_cached_by_one_override(
    tmp_path, ds_distill, command_environment
):
    """On two ranks, sharded in bf16 as the recipe has it. One is slow: the other one is through
    with a phase that is left out before it looks whether that was done before."""
    environment = with_plants(command_environment, tmp_path) | {"DS_DISTILL_TEST_PLANT": "slow:1:0"}
    assert load_recipe("large-teachers").phases[-2].teachers == "live"
    recipe = Toys(tmp_path).recipe(load_recipe("large-teachers"))
    settings = yaml.safe_load(dump_recipe(recipe)) | {"deepspeed": "zero3_bf16"}
    file = written(settings, tmp_path)
    losses = {}
    for teachers in ("live", "cached"):
        folder = tmp_path / teachers
        options = ["--num-gpus", "2", "--folder", folder, "timeout_minutes=2"]
        options += ["phases.distil.teachers=cached"] if teachers == "cached" else []
        ds_distill("launch", file, *options, env=environment, timeout=900)
        [cache] = [record for record in results(folder)["phases"] if "added" in record]
        assert (cache["added"] > 0) == (teachers == "cached")
        trained = [e for e in events(folder) if e["event"] == "train" and e["phase"] == "student"]
        losses[teachers] = trained[0]["kl"]
    assert losses["live"] == pytest.approx(losses["cached"], rel=0.05)
