"""A teacher that knows nothing leaves the set: cached and live distillation do without it, on one
process and on two, and the evaluation shows it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ci.test_multi_label import write_task
from runs import losses
from toys import make_toy_classifier

from ds_distill.routing.multi_label import load_fitted

KL = {"split": "transfer", "epochs": 1, "losses": {"kl": {"temperature": 2.0}}}


def phases_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    first, second = copy.deepcopy(settings["phases"][:2])
    for phase in (first, second):  # each is best at the class that the other has never seen
        phase["fine-tune"]["focus"]["share_of_others"] = 0.0
    return [
        first,
        second,
        {"cache": {"name": "for-routing", "splits": "validation", "hidden": [-1]}},
        {"expertise": {"leave_out": "unqualified"}},
        {"cache": {"splits": "transfer", "hidden": [-1], "dtype": "float32"}},
        {"distil": {**KL, "teachers": "cached", "routing": ["expertise", "chosen"]}},
        {"distil": {**KL, "name": "live", "routing": "expertise", "save_as": "live"}},
    ]


@pytest.fixture(scope="module")
def recipe(toy_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, and before them a teacher with random weights, which no phase trains."""
    here = tmp_path_factory.mktemp("qualified")
    settings = {
        **toy_settings,
        "teachers": {
            "ignorant": {"model": str(make_toy_classifier(here / "ignorant"))},
            **toy_settings["teachers"],
        },
        "training": {**toy_settings["training"], "dropout": 0.0},
        "phases": phases_of(toy_settings),
        "logging": {"every": 1},
        "deepspeed": "zero3_fp32",
    }
    (here / "toy.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    settings["phases"].append({"evaluate": {"split": "test"}})
    (here / "evaluated.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return here / "toy.yaml"


@pytest.fixture(scope="module")
def one(recipe: Path, ds_distill: Any) -> Path:
    folder = recipe.parent / "one"
    done = ds_distill("run", recipe.with_name("evaluated.yaml"), "--folder", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "console.txt").write_text(done.stdout)
    return folder


def record_of(folder: Path, name: str) -> dict[str, Any]:
    [path] = (folder / "phases").glob(f"*-{name}.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_who_left_and_why_is_recorded_and_shown(one: Path) -> None:
    record = record_of(one, "expertise")
    assert record["teachers"] == ["first", "second"]
    why = record["left_out"]["ignorant"]
    assert "best at no class" in why or why == "predicts no class better than chance"
    assert set(record["overall"]) == set(record["comparison"]["teachers"]) == {"first", "second"}
    assert set(record["comparison_of_all"]["teachers"]) == {"ignorant", "first", "second"}
    for text in ((one / "console.txt").read_text(), (one / "report.html").read_text()):
        assert "ignorant, which" in " ".join(text.split())
    assert "Left out: ignorant" in (one / "student" / "README.md").read_text()


def test_phases_after_it_have_the_others(one: Path) -> None:
    assert load_fitted(one / "routing.safetensors").teachers == ("first", "second")
    manifests = {
        path.parent.name: set(json.loads(path.read_text())["teachers"])
        for path in (one / "cache").glob("*/manifest.json")
    }
    assert manifests["02-for-routing"] == {"ignorant", "first", "second"}
    assert manifests["04-cache"] == {"first", "second"}
    assert losses(one, "live") == pytest.approx(losses(one, "expertise"), rel=1e-4)


def test_the_evaluation_shows_all(one: Path) -> None:
    models = record_of(one, "evaluate")["models"]
    assert {"ignorant", "first", "second", "expertise", "chosen", "live"} == set(models)
    assert models["ignorant"]["role"] == "teacher"


def test_route_leaves_it_out_too(one: Path, recipe: Path, ds_distill: Any) -> None:
    done = ds_distill("route", recipe.with_name("evaluated.yaml"), "--folder", one)
    assert done.returncode == 0, done.stderr
    assert "Left out: ignorant" in done.stdout and "teacher ignorant" not in done.stdout


def test_where_examples_have_many_labels(recipe: Path, ds_distill: Any) -> None:
    """Two teachers learn all labels, the third knows none; each that stays is best at some."""
    here = recipe.parent
    settings = yaml.safe_load(recipe.read_text())
    for phase in settings["phases"][:2]:
        del phase["fine-tune"]["focus"]
        phase["fine-tune"]["epochs"] = 8
    settings |= {
        "task": {
            "type": "multi-label",
            "data": {"path": str(write_task(here / "sets")), "columns": {"label": "labels"}},
            "max_length": 16,
        },
        "phases": [
            *settings["phases"][:2],
            {"expertise": {"leave_out": "unqualified"}},
            {"distil": {**KL, "routing": ["expertise"]}},
        ],
    }
    (here / "sets.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    done = ds_distill("run", here / "sets.yaml", "--folder", here / "of-sets")
    assert done.returncode == 0, done.stdout + done.stderr
    record = record_of(here / "of-sets", "expertise")
    assert "ignorant" in record["left_out"]
    stay = set(record["teachers"])
    assert stay == {"ignorant", "first", "second"} - set(record["left_out"])
    assert stay == set(record["experts"].values()) == set(record["f1"])
    assert set(load_fitted(here / "of-sets" / "routing.safetensors").teachers) == stay
    assert losses(here / "of-sets", "student")
