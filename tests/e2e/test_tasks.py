"""A recipe with two tasks: a masked-LM of the texts first, then their topics."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def settings(toy_settings: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(toy_settings)
    topics = found.pop("task")
    corpus = {"type": "masked-lm", "data": topics["data"], "max_length": topics["max_length"]}
    found["tasks"] = {"corpus": corpus, "topics": topics}
    found["training"] |= {"epochs": 1, "dropout": 0.0}
    [teacher, *_] = found["teachers"]
    found["teachers"] = {teacher: found["teachers"][teacher]}
    found["phases"] = [
        {"fine-tune": {"name": "adapt", "task": "corpus", "models": "student", "save_as": "base"}},
        {"evaluate": {"name": "corpus", "task": "corpus", "split": "test"}},
        {"fine-tune": {"name": "teach", "task": "topics", "models": teacher}},
        {"cache": {"task": "topics", "splits": ["train", "validation"]}},
        {"expertise": {"task": "topics"}},
        {
            "distil": {
                "task": "topics",
                "start": "base",
                "teachers": "cached",
                "routing": "chosen",
                "losses": {"kl": {}},
            }
        },
        {"evaluate": {"name": "topics", "task": "topics", "split": "test"}},
    ]
    return found


@pytest.fixture(scope="module")
def folders(
    settings: dict[str, Any], ds_distill: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Ranks -> the folder of a run."""
    root = tmp_path_factory.mktemp("tasks")
    (root / "two.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    commands = {
        1: ["run", "two.yaml"],
        2: ["launch", "two.yaml", "--num-gpus", "2", "deepspeed=zero3_fp32"],
    }
    for ranks, command in commands.items():
        done = ds_distill(*command, "--folder", root / str(ranks), cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr
    return {ranks: root / str(ranks) for ranks in commands}


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_task_has_its_data_its_routing_and_its_models(
    folders: dict[int, Path], settings: dict[str, Any], ranks: int
) -> None:
    folder = folders[ranks]
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


def test_a_model_keeps_its_body_across_tasks(folders: dict[int, Path]) -> None:
    models = folders[1] / "models"
    base = AutoModelForMaskedLM.from_pretrained(models / "00-base")
    student = AutoModelForSequenceClassification.from_pretrained(models / "05-student")
    assert base.config.num_hidden_layers == student.config.num_hidden_layers
    names = dict(student.bert.named_parameters())
    close = [(names[n] - w).abs().mean() for n, w in base.bert.named_parameters()]
    assert 0 < max(close) < 0.05, "trained on from the base's weights"


def test_losses_on_two_ranks_are_those_on_one(folders: dict[int, Path]) -> None:
    def losses(folder: Path) -> list[tuple[str, int, float]]:
        events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(e["phase"], e["step"], e["loss"]) for e in events if e["event"] == "train"]

    one, two = losses(folders[1]), losses(folders[2])
    assert [loss[:2] for loss in one] == [loss[:2] for loss in two] and len(one) > 5
    assert [loss[2] for loss in two] == pytest.approx([loss[2] for loss in one], rel=2e-3)


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
