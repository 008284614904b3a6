"""A teacher that knows nothing leaves the set: cached and live distillation do without it, on one
process and on two, and the evaluation shows it."""

import json

import pytest
from runs import evaluation, losses, results, written
from toys import make_toy_classifier, recipe_of

from ds_distill.routing.multi_label import load_fitted


@pytest.fixture(scope="module")
def recipe(toy_task, tiny_models, tmp_path_factory):
    """Two experts, and before them a teacher with random weights, which no phase trains."""
    here = tmp_path_factory.mktemp("qualified")
    ignorant = make_toy_classifier(here / "ignorant")
    made = recipe_of("unqualified", task=toy_task, toy=tiny_models["toy"], ignorant=ignorant)
    return written(made, here)


@pytest.fixture(scope="module")
def one(recipe, ds_distill):
    folder = recipe.parent / "one"
    done = ds_distill("run", recipe, "--folder", folder)
    (folder / "console.txt").write_text(done.stdout)
    return folder


def test_who_left_and_why_is_recorded_and_shown(one):
    record = results(one)["phases"][3]
    assert record["teachers"] == ["first", "second"]
    why = record["left_out"]["ignorant"]
    assert "best at no class" in why or why == "predicts no class better than chance"
    assert set(record["overall"]) == set(record["comparison"]["teachers"]) == {"first", "second"}
    for text in ((one / "console.txt").read_text(), (one / "report.html").read_text()):
        assert "ignorant, which" in " ".join(text.split())
    assert "Left out: ignorant" in (one / "student" / "README.md").read_text()
    scored = [(score["teacher"], score["phase"]) for score in results(one)["teacher_scores"]]
    assert scored == [(name, record["phase"]) for name in record["teachers"]]


def test_phases_after_it_have_the_others(one):
    assert load_fitted(one / "routing.safetensors").teachers == ("first", "second")
    manifests = {
        path.parent.name: set(json.loads(path.read_text())["teachers"])
        for path in (one / "cache").glob("*/manifest.json")
    }
    assert manifests["02-for-routing"] == {"ignorant", "first", "second"}
    assert manifests["04-cache"] == {"first", "second"}
    assert losses(one, "live") == pytest.approx(losses(one, "expertise"), rel=1e-4)


def test_the_evaluation_shows_all(one):
    models = evaluation(one)["models"]
    assert {"ignorant", "first", "second", "expertise", "chosen", "live"} == set(models)
    assert models["ignorant"]["role"] == "teacher"


def test_route_leaves_it_out_too(one, recipe, ds_distill):
    done = ds_distill("route", recipe, "--folder", one)
    assert "Left out: ignorant" in done.stdout and "teacher ignorant" not in done.stdout
