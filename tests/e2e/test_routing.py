"""Routing that learns: fitted, compared, chosen and followed, from the command line."""

import json

import pytest
import torch
import yaml
from kinds import json_lines
from runs import evaluation, losses, results, written
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ds_distill.keys import content_keys


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_settings, ds_distill):
    """A run whose table comes from the cache, with students of cached and of live teachers."""
    here = tmp_path_factory.mktemp("here")
    how = {"split": "transfer", "epochs": 1, "losses": {"kl": {"temperature": 2.0}}}
    phases = [
        *toy_settings["phases"][:2],
        {"cache": {"splits": ["validation", "transfer"], "hidden": [-1], "dtype": "float32"}},
        {"expertise": {"split": "validation"}},
        {"distil": {**how, "teachers": "cached", "routing": ["gate", "chosen"]}},
        {"distil": {**how, "teachers": "live", "routing": "gate", "save_as": "live-gate"}},
        {"evaluate": {"split": "test"}},
    ]
    settings = {**toy_settings, "phases": phases}
    written(settings, here, "toy")
    ds_distill("run", "toy.yaml", "--folder", "run", cwd=here)
    return here


def test_the_choice_is_recorded_shown_and_followed(finished):
    run = finished / "run"
    comparison = results(run)["phases"][3]["comparison"]
    assert comparison == json.loads((run / "routing.json").read_text())
    assert comparison["choice"] in comparison["policies"]
    page = (run / "report.html").read_text()
    assert "Which policy’s target is right?" in page
    assert f"{comparison['choice']} (chosen)" in page
    with safe_open(run / "routing.safetensors", "pt") as file:
        assert "gate.weight" in file.keys()  # noqa: SIM118
    if comparison["choice"] == "gate":
        assert losses(run, "chosen") == losses(run, "gate")


def test_results_name_no_place_of_this_machine(finished):
    assert results(finished / "run")["phases"][2]["folder"] == "cache/02-cache"
    assert str(finished) not in (finished / "run" / "results.json").read_text()


def test_what_was_fitted_on_chose_nothing(finished, toy_task):
    """By what the run left: the keys in what was fitted, and each model's accuracy on the other
    examples, which is the one that chose its epoch."""
    run = finished / "run"
    rows = json_lines(toy_task / "validation.jsonl")
    keys = content_keys([row["text"] for row in rows]).tolist()
    with safe_open(run / "routing.safetensors", "pt") as file:
        fitted = file.get_tensor("keys").tolist()
    assert set(map(tuple, fitted)) < set(map(tuple, keys))
    rest = [row for row, key in zip(rows, keys, strict=True) if key not in fitted]
    found = results(run)
    assert found["phases"][3]["examples"] == len(fitted) > 20
    trained = [model for phase in found["phases"] for model in phase.get("trained", [])]
    assert len(trained) == 5
    for model in trained:
        choosing = model["choosing"]
        assert (choosing["split"], choosing["examples"]) == ("validation", len(rest))
        [folder] = (run / "models").glob(f"??-{model['output']}")
        right = sum(
            guess == row["label"] for guess, row in zip(predicted(folder, rest), rest, strict=True)
        )
        assert choosing["score"] == pytest.approx(right / len(rest)), model["output"]
    uses = {use["use"]: (use["split"], use["examples"]) for use in found["uses"]}
    assert uses["fit"] == ("validation", len(fitted))
    assert uses["choose"] == ("validation", len(rest))
    assert uses["judge"] == ("test", 60)


def predicted(folder, rows):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [row["text"] for row in rows]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    return [model.config.id2label[number] for number in logits.argmax(1).tolist()]


def test_the_baseline_is_what_counting_says(finished, toy_task):
    rows = json_lines(toy_task / "test.jsonl")
    record = evaluation(finished / "run")
    baseline = record["baseline"]
    assert baseline["answer"] == "animal", "67 of the 200 of train; food has as many, and is later"
    share = sum(row["label"] == "animal" for row in rows) / len(rows)
    assert baseline["accuracy"] == pytest.approx(share)
    for model in record["models"].values():
        difference = model["to_baseline"]["difference"]
        assert difference == pytest.approx(model["accuracy"] - share)
    students = ["gate", "chosen", "live-gate"]
    pairs = [(row["student"], row["other"]) for row in record["comparisons"]]
    assert {pair for pair in pairs if pair[1] in students} == {
        (one, other) for one in students for other in students if one != other
    }


def test_the_gate_reads_the_same_from_the_cache_as_from_live_teachers(finished):
    cached, live = losses(finished / "run", "gate"), losses(finished / "run", "live-gate")
    assert len(cached) > 0
    assert cached == pytest.approx(live, rel=1e-3)


def test_route_takes_a_recipe_that_ends_with_its_cache(finished, ds_distill):
    settings = yaml.safe_load((finished / "toy.yaml").read_text())
    settings["phases"] = settings["phases"][:3]
    written(settings, finished, "cache")
    whole, cached = (
        ds_distill("route", name, "--folder", "run", cwd=finished)
        for name in ("toy.yaml", "cache.yaml")
    )
    assert cached.stdout == whole.stdout


def test_route_tells_the_same_as_the_run_and_changes_nothing(finished, ds_distill):
    run = finished / "run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = ds_distill("route", "toy.yaml", "--folder", "run", cwd=finished)
    comparison = json.loads((run / "routing.json").read_text())
    assert f"Routing `chosen` is {comparison['choice']} here." in done.stdout
    for name, score in comparison["policies"].items():
        own = f"{name} (chosen)  " if name == comparison["choice"] else f"{name}  "
        [line] = [line for line in done.stdout.splitlines() if line.startswith(own)]
        assert f"{score['score']:.1%}" in line
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
