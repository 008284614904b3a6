"""Live teachers read the texts of several optimizer steps at once: where windows begin and end, and
that a run which was stopped within one ends as if left alone."""

import copy
import signal

import pytest
from runs import digests, written
from toys import make_toy_classifier

from ds_distill import load_recipe, run_recipe
from ds_distill.engine.engine import Engine
from ds_distill.process import signals as stopping
from ds_distill.process.signals import Stopped
from ds_distill.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("in_this_process")

KL_ALONE = {"kl": {}}


@pytest.fixture
def heard(monkeypatch):
    """Of each pass of the teachers, how many micro-batches they read."""
    found = []
    said = Engine._teachers_read

    def noted(engine, batches):
        found.append(len(batches))
        return said(engine, batches)

    monkeypatch.setattr(Engine, "_teachers_read", noted)
    return found


def recipe_of(settings, folder, losses=KL_ALONE, **more):
    """Two epochs of live teachers."""
    settings = copy.deepcopy(settings)
    classifier = make_toy_classifier(folder / "teacher")
    settings["teachers"] = {name: {"model": str(classifier)} for name in ("first", "second")}
    settings["training"] |= {"epochs": 2, "batch_size": 20, "dropout": 0.1}
    distil = {"teachers": "live", "losses": losses, "keep": "last"}
    settings["phases"] = [{"distil": {**distil, "routing": "average"}}]
    return written({**settings, "padding": "never", **more}, folder)


@pytest.mark.parametrize(
    ("losses", "more", "expected"),
    [
        (KL_ALONE, {}, [8, 2, 8, 2]),  # a window ends with the epoch
        # and where nothing needs the teachers any more, or not yet
        ({"kl": {"until": 0.2}, "cross_entropy": {}}, {}, [4]),
        ({"kl": {"from": 0.85}, "cross_entropy": {}}, {}, [3]),
        (KL_ALONE, {"padding": "always"}, []),  # in the step itself
        (KL_ALONE, {"padding": "always", "deepspeed": "zero3_fp32"}, [8, 2, 8, 2]),
    ],
)
def test_what_teachers_read_at_once(toy_settings, tmp_path, heard, capsys, losses, more, expected):
    run_recipe(load_recipe(recipe_of(toy_settings, tmp_path, losses, **more)), tmp_path / "run")
    assert heard == expected
    said = "teachers read the texts of 8 steps at once" in capsys.readouterr().out
    assert said == bool(expected)


@pytest.mark.parametrize("config", ["zero0_fp32", "zero3_fp32"])
def test_a_stop_within_a_window_changes_nothing(toy_settings, tmp_path, heard, monkeypatch, config):
    """Teachers read its texts again: what they say depends, in the last digits, on what they read
    together."""
    monkeypatch.setattr(stopping, "_requested", None)
    file = recipe_of(toy_settings, tmp_path, deepspeed=config)
    recipe = load_recipe(file, ["training.save_every=3"])
    run_recipe(recipe, tmp_path / "whole")
    save = Checkpoints.save

    def stopped(*given):
        save(*given)
        if given[2] == 3:
            assert stopping._request_stop(signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", stopped)
    heard.clear()
    with pytest.raises(Stopped, match=r"at step 4$"):
        run_recipe(recipe, tmp_path / "run")
    monkeypatch.setattr(stopping, "_requested", None)
    run_recipe(recipe, tmp_path / "run", resume=True)
    assert heard == [8, 8, 2, 8, 2]
    found, expected = (digests(tmp_path / name) for name in ("run", "whole"))
    assert found == expected and found
