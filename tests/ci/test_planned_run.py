"""What a run on GPUs is planned to hold: the warning before it starts, and its results."""

from dataclasses import replace

from unit.test_planned_run import (
    notes,
    recipe,  # noqa: F401
)

from ds_distill import run_recipe
from ds_distill.planning.gpus import GPUS, RESERVE
from ds_distill.run import execute as execute_module


def test_what_does_not_fit_is_told_before_it_starts(recipe, tmp_path):
    roomy = GPUS["l4"]
    told, [teach, *_] = notes(recipe, roomy, tmp_path)
    assert told == []
    enough = int(teach / (1 - RESERVE)) + 1
    # So little that the batch does not fit, while a part of it does.
    tight, _ = notes(recipe, replace(roomy, memory=enough - 300_000), tmp_path)
    assert tight and "phase teach may not fit: planned are" in tight[0]
    assert "A micro_batch_size of " in tight[0]
    none, _ = notes(recipe, replace(roomy, memory=1000), tmp_path)
    assert "`ds-distill plan` shows what would" in none[0]


def test_results_have_what_was_planned(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(execute_module, "planned_device", lambda world: GPUS["l4"])
    results = run_recipe(recipe, tmp_path / "run").results
    trained = [one for phase in results["phases"] for one in phase["trained"]]
    assert len(trained) == 3 and all(one["planned_bytes"] > 0 for one in trained)
