"""A recipe with two tasks: a masked-LM of the texts first, then their topics."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import results, run_here
from toys import recipe_of
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def settings(toy_task: Path, tiny_models: dict[str, Path]) -> dict[str, Any]:
    return recipe_of("tasks", task=toy_task, toy=tiny_models["toy"])


@pytest.fixture(scope="module")
def folder(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(settings, tmp_path_factory.mktemp("tasks"))


def test_each_task_has_its_data_its_routing_and_its_models(
    folder: Path, settings: dict[str, Any]
) -> None:
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


def test_a_model_keeps_its_body_across_tasks(folder: Path) -> None:
    models = folder / "models"
    base = AutoModelForMaskedLM.from_pretrained(models / "00-base")
    student = AutoModelForSequenceClassification.from_pretrained(models / "05-student")
    assert base.config.num_hidden_layers == student.config.num_hidden_layers
    names = dict(student.bert.named_parameters())
    close = [(names[n] - w).abs().mean() for n, w in base.bert.named_parameters()]
    assert 0 < max(close) < 0.05, "trained on from the base's weights"


def refusal(ds_distill: Any, folder: Path, settings: dict[str, Any]) -> str:
    (folder / "wrong.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    done = ds_distill("check", "wrong.yaml", cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join(done.stderr.split())


def test_mistakes_between_tasks(ds_distill: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    wrong = copy.deepcopy(settings)
    del wrong["phases"][0]["fine-tune"]["task"]
    found = refusal(ds_distill, tmp_path, wrong)
    assert (
        "phases.0.fine-tune.task: is required, because there are several: corpus, topics" in found
    )
    wrong = copy.deepcopy(settings)
    wrong["phases"][0]["fine-tune"]["task"] = "text"
    assert "there is no task 'text'. There is: corpus, topics" in refusal(
        ds_distill, tmp_path, wrong
    )
    wrong = copy.deepcopy(settings)
    wrong["phases"][3]["cache"]["task"] = "corpus"
    wrong["tasks"]["corpus"]["max_length"] = 1000
    wrong["tasks"]["corpus"]["data"]["splits"] = {"train": "nowhere"}
    found = refusal(ds_distill, tmp_path, wrong)
    for mistake in (
        "whose head it has now",
        "tasks.corpus.max_length=1000",
        "tasks.corpus.data.splits.train=nowhere",
        "Set tasks.corpus.masking.variants",
        "teachers=cached, and no cache phase before it holds",
    ):
        assert mistake in found, mistake
