"""A recipe with two tasks: a masked-LM of the texts first, then their topics."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import run_ranks
from runs import results
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


ONE_RANK = "one rank, stage 1"
ON_TWO_RANKS = [f"two ranks, stage {stage}" for stage in range(4)]
RANK = """
import os
from pathlib import Path

from ds_distill import load_recipe, run_recipe
from ds_distill.evaluation import bootstrap

marked = bootstrap.marked
def counted(*arguments):
    Path("intervals-" + os.environ["RANK"]).touch()
    return marked(*arguments)
bootstrap.marked = counted

for stage in range(4):
    overrides = [f"deepspeed=zero{stage}_fp32"]
    run_recipe(load_recipe("two.yaml", overrides), f"two ranks, stage {stage}")
"""


@pytest.fixture(scope="module")
def folders(
    settings: dict[str, Any],
    ds_distill: Any,
    command_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """A run on one rank, and on two in each stage: these in one launch."""
    root = tmp_path_factory.mktemp("tasks")
    (root / "two.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (root / "rank.py").write_text(RANK)
    done = ds_distill("run", "two.yaml", "--folder", ONE_RANK, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    run_ranks(["rank.py"], 2, command_environment, root)
    return {name: root / name for name in (ONE_RANK, *ON_TWO_RANKS)}


@pytest.mark.parametrize("which", [ONE_RANK, ON_TWO_RANKS[3]])
def test_each_task_has_its_data_its_routing_and_its_models(
    folders: dict[str, Path], settings: dict[str, Any], which: str
) -> None:
    folder = folders[which]
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


def test_a_model_keeps_its_body_across_tasks(folders: dict[str, Path]) -> None:
    models = folders[ONE_RANK] / "models"
    base = AutoModelForMaskedLM.from_pretrained(models / "00-base")
    student = AutoModelForSequenceClassification.from_pretrained(models / "05-student")
    assert base.config.num_hidden_layers == student.config.num_hidden_layers
    names = dict(student.bert.named_parameters())
    close = [(names[n] - w).abs().mean() for n, w in base.bert.named_parameters()]
    assert 0 < max(close) < 0.05, "trained on from the base's weights"


@pytest.mark.parametrize("which", ON_TWO_RANKS)
def test_losses_on_two_ranks_are_those_on_one(folders: dict[str, Path], which: str) -> None:
    def losses(folder: Path) -> list[tuple[str, int, float]]:
        events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(e["phase"], e["step"], e["loss"]) for e in events if e["event"] == "train"]

    one, two = losses(folders[ONE_RANK]), losses(folders[which])
    assert [loss[:2] for loss in one] == [loss[:2] for loss in two] and len(one) > 5
    # A loss near 0 is a difference of float32s near 1: it has their error, not its own.
    assert [loss[2] for loss in two] == pytest.approx([loss[2] for loss in one], rel=2e-6, abs=5e-7)


def test_one_rank_resamples(folders: dict[str, Path]) -> None:
    """The others would only take its memory bandwidth, and as long."""
    root = folders[ONE_RANK].parent
    assert [path.name for path in root.glob("intervals-*")] == ["intervals-0"]


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
