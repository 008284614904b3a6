"""A recipe with two tasks: a masked-LM of the texts first, then their topics."""

import pytest
from runs import results, run_here
from toys import recipe_of
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def settings(toy_task, tiny_models):
    return recipe_of("tasks", task=toy_task, toy=tiny_models["toy"])


@pytest.fixture(scope="module")
def folder(settings, tmp_path_factory):
    return run_here(settings, tmp_path_factory.mktemp("tasks"))


def test_each_task_has_its_data_its_routing_and_its_models(folder, settings):
    [teacher] = settings["teachers"]
    assert (folder / "data" / "corpus" / "train").is_dir()
    assert (folder / "data" / "topics" / "validation").is_dir()
    assert (folder / "routing-topics.safetensors").is_file()
    assert not (folder / "routing.json").exists()
    found = results(folder)
    corpus, topics = (r for r in found["phases"] if r["kind"] == "evaluate")
    assert (corpus["task"], topics["task"]) == ("corpus", "topics")
    assert list(corpus["models"]) == ["base"], "the teacher has no masked-LM head"
    assert list(topics["models"]) == [teacher, "student"], "the base's head is of another task"
    assert found["task"] == "topics" and found["student"] == "student"
    assert "accuracy" in found["verdict"] and "60 examples" in found["verdict"]
    assert {use["task"] for use in found["uses"]} == {"corpus", "topics"}


def test_a_model_keeps_its_body_across_tasks(folder):
    models = folder / "models"
    base = AutoModelForMaskedLM.from_pretrained(models / "00-base")
    student = AutoModelForSequenceClassification.from_pretrained(models / "05-student")
    assert base.config.num_hidden_layers == student.config.num_hidden_layers
    names = dict(student.bert.named_parameters())
    close = [(names[n] - w).abs().mean() for n, w in base.bert.named_parameters()]
    assert 0 < max(close) < 0.05, "trained on from the base's weights"
