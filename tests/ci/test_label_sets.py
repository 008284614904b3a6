"""Two teachers that know two of the three classes each, from the recipe to the student."""

import numpy as np
import pytest
import torch
from kinds import json_lines
from runs import evaluation, losses, results, run_here, written
from toys import recipe_of

from ds_distill import run_recipe
from ds_distill.cache.reader import CacheReader
from ds_distill.check.check import check_all
from ds_distill.errors import UserError
from ds_distill.files import read_json
from ds_distill.keys import content_keys
from ds_distill.phases.expertise import route
from ds_distill.recipe import load_recipe
from ds_distill.reporting.result_tables import evaluation_tables, verdict
from ds_distill.run.execute import execute


@pytest.fixture(scope="module")
def recipe(toy_task, tiny_models, tmp_path_factory):
    """The file of a recipe; beside it `run`, which trained its teacher."""
    places = {"task": toy_task, "toy": tiny_models["toy"]}
    folder = run_here(recipe_of("sound", **places), tmp_path_factory.mktemp("sets")).parent
    sets = recipe_of("sets", sound=folder / "run" / "models" / "00-sound", **places)
    return written(sets, folder, "sets")


@pytest.fixture(scope="module")
def run(recipe):
    run_recipe(load_recipe(recipe), recipe.with_name("sets"))
    return recipe.with_name("sets")


def test_the_cache_has_a_column_for_each_known_class(run, toy_task):
    reader = CacheReader(run / "cache" / "00-cache")
    texts = [row["text"] for row in json_lines(toy_task / "transfer.jsonl")]
    rows = reader.indices(content_keys(texts))
    for name, known in (("first", [0, 1]), ("second", [1, 2])):
        signals = reader.read(name, rows)
        assert signals.logits.shape[1] == 2
        assert signals.classes.tolist() == known
    first, second = (reader.read(name, rows).logits for name in ("first", "second"))
    torch.testing.assert_close(first[:, 1], second[:, 0])  # of the same checkpoint


def test_cached_teachers_give_the_losses_of_live_ones(run):
    cached, live = losses(run, "average"), losses(run, "live")
    assert cached == pytest.approx(live, rel=1e-4) and len(live) > 2


def test_the_comparison_has_what_can_be_trained(run):
    comparison = read_json(run / "routing.json")
    assert set(comparison["policies"]) == {"average, losses", "gate"}
    assert comparison["baseline"] == "average, losses"
    chosen = {"gate": "gate", "average, losses": "average"}[comparison["choice"]]
    assert losses(run, "chosen") == losses(run, chosen)
    assert "average, losses" in (run / "report.html").read_text()


def test_route_judges_teachers_on_all_classes(recipe, run, capsys):
    """Each is best at the class that the other lacks, so both stay."""
    comparison = route(load_recipe(recipe, ["phases.expertise.leave_out=unqualified"]), run)
    assert set(comparison.teachers) == {"first", "second"}
    assert "Left out" not in capsys.readouterr().out


def test_a_teacher_is_never_right_on_a_class_that_it_lacks(run):
    record = evaluation(run)
    models = record["models"]
    assert models["first"]["per_class"]["weather"] == 0.0
    assert models["second"]["per_class"]["animal"] == 0.0
    assert np.array(models["first"]["confusion"])[:, 2].sum() == 0
    assert models["first"]["per_class"]["animal"] > 0.8
    alone = max(models[name]["accuracy"] for name in ("first", "second"))
    assert models["gate"]["accuracy"] > alone
    assert record["warnings"] == []


def test_wherever_its_score_stands_it_says_how_many_labels_a_teacher_knows(run):
    record = evaluation(run)
    assert record["models"]["second"]["knows"] == {"labels": ["food", "weather"], "of": 3}
    assert "knows" not in record["models"]["gate"]
    of_first = record["models"]["first"]["accuracy"]
    limit = "(knows 2 of 3 labels)"
    assert f"`first` ({of_first:.1%}) (knows 2 of 3 labels)" in verdict(results(run))
    [table, *_] = evaluation_tables(record)
    assert [row[0] for row in table.rows[:2]] == [f"first {limit}", f"second {limit}"]
    card = (run / "student" / "README.md").read_text()
    assert f"| second {limit} | teacher |" in card
    report = (run / "report.html").read_text()
    assert report.count(f">first {limit}</td>") == 2, "also before a student learnt from it"
    assert "first knows animal, food: its score counts examples of all 3 labels." in report


def test_a_cache_of_another_mapping_is_refused(recipe, run, tmp_path):
    folder = run / "cache" / "00-cache"
    other = ["teachers.first.labels.weather=food", f"phases.cache.folder={folder}"]
    with pytest.raises(UserError, match="was cached with labels"):
        execute(load_recipe(recipe, other), tmp_path / "run", first=1)


def test_check_notes_who_knows_what_and_what_a_loss_leaves_open(recipe):
    """Teachers that share a label are compared by way of it."""
    text = "\n".join(check_all(load_recipe(recipe)))
    assert "teachers.first.labels: knows 2 of the 3 labels (animal, food)" in text
    assert "leaves open" not in text
