"""A run whose task has a metric of its own: what it chooses, and what it reports."""

import numpy as np
import pytest
from kinds import json_lines
from runs import evaluation, logged, results, written
from sklearn.metrics import f1_score
from toys import recipe_of
from transformers import pipeline


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_task, tiny_models, ds_distill):
    here = tmp_path_factory.mktemp("here")
    written(recipe_of("measured", task=toy_task, toy=tiny_models["toy"]), here, "toy")
    done = ds_distill("run", "toy.yaml", "--folder", "run", cwd=here)
    (here / "printed.txt").write_text(done.stdout)
    return here


def test_the_metric_chooses_epoch_and_student(finished):
    run, chosen = finished / "run", {}
    for phase in results(run)["phases"]:
        for model in phase.get("trained", []):
            choosing, validations = model["choosing"], logged(run, "validation", model["output"])
            assert choosing["metric"] == "micro_f1"
            of_model = {event["epoch"]: event["micro_f1"] for event in validations}
            assert choosing["score"] == max(of_model.values()) == of_model[choosing["epoch"]]
            if phase["kind"] == "distil":
                chosen[model["output"]] = choosing["score"]
    assert chosen.keys() == {"average", "gate"}
    assert results(run)["student"] == max(chosen, key=lambda name: chosen[name])
    comparison = results(run)["phases"][2]["comparison"]
    assert comparison["metric"] == "micro_f1"
    scores = [score["score"] for score in comparison["policies"].values()]
    assert 0 < min(scores) < max(scores) <= 1


def test_the_score_is_that_of_the_shipped_student(finished, toy_task):
    rows = json_lines(toy_task / "test.jsonl")
    classify = pipeline("text-classification", model=str(finished / "run" / "student"))
    texts = [row["text"] for row in rows]
    predicted = [one["label"] for one in classify(texts, truncation=True, max_length=32)]
    labels = [row["label"] for row in rows]
    kept = sorted({*labels} - {"animal"})
    wanted = f1_score(labels, predicted, labels=kept, average="micro")
    record, found = evaluation(finished / "run"), results(finished / "run")
    own = record["models"][found["student"]]
    assert (record["metric"], record["metric_settings"]) == ("micro_f1", {"leave_out": ["animal"]})
    assert own["micro_f1"] == pytest.approx(wanted)
    assert own["accuracy"] == pytest.approx(np.mean(np.array(predicted) == np.array(labels)))
    assert list(own)[:2] == ["role", "parameters"]
    assert list(own)[2:7] == ["examples", "micro_f1", "accuracy", "macro_f1", "ece"]
    for row in record["comparisons"]:
        models = record["models"]
        difference = models[row["student"]]["micro_f1"] - models[row["other"]]["micro_f1"]
        assert row["difference"] == pytest.approx(difference)
        low, high = row["interval"]
        assert low - 1e-9 <= difference <= high + 1e-9
        assert ("retention" in row) == (models[row["other"]]["role"] == "teacher")


def test_all_that_is_written_for_people_names_it(finished):
    found = results(finished / "run")
    shown = f"{evaluation(finished / 'run')['models'][found['student']]['micro_f1']:.1%}"
    assert f"micro F1 {shown} on" in found["verdict"]
    assert f"micro F1 {shown}" in (finished / "printed.txt").read_text()
    page = (finished / "run" / "report.html").read_text()
    assert "Micro F1 on test" in page and "Micro F1: leave out animal." in page
    card = (finished / "run" / "student" / "README.md").read_text()
    assert "## Micro F1 on test" in card and "name: Micro F1" in card
