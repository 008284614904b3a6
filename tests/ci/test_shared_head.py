"""Teachers that are trained together through one head: two of unlike tokenizers, and then the
student that MT-BERT makes of them. test_two_ranks.py has them sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import run_here
from safetensors.torch import load_file
from toys import recipe_of
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from ds_distill import load_recipe, run_recipe
from ds_distill.models.configuration import CLASSIFIER_HEADS
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner
from ds_distill.run.folder import RunFolder
from ds_distill.training.loop import _Training

TOGETHER = "reads+spells"
HEADS = ("reads", "spells")


@pytest.fixture(scope="module")
def settings(materials: Path) -> dict[str, Any]:
    return recipe_of("together", materials=materials)


@pytest.fixture(scope="module")
def folder(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(settings, tmp_path_factory.mktemp("together"))


def events(folder: Path, event: str, phase: str) -> list[dict[str, Any]]:
    every = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one for one in every if (one["event"], one["phase"]) == (event, phase)]


def head(folder: Path, name: str) -> dict[str, torch.Tensor]:
    weights = load_file(folder / "models" / f"00-{name}" / "model.safetensors")
    layers = zip(("pooling", "prediction"), CLASSIFIER_HEADS["bert"], strict=True)
    return {f"{as_}.{w}": weights[f"{at}.{w}"] for as_, at in layers for w in ("weight", "bias")}


def test_teachers_have_one_head_and_the_sum_of_their_losses(folder: Path) -> None:
    reads, spells = (head(folder, name) for name in HEADS)
    assert [list(one.shape) for one in reads.values()] == [[32, 32], [32], [4, 32], [4]]
    for name, weight in reads.items():
        torch.testing.assert_close(spells[name], weight, rtol=0, atol=0)
    first = events(folder, "train", TOGETHER)[0]
    parts = [first[f"{name}/cross_entropy"] for name in HEADS]
    assert first["loss"] == pytest.approx(sum(parts)) and min(parts) > 0.5


def results(folder: Path) -> list[Any]:
    return json.loads((folder / "results.json").read_text())["phases"]


@pytest.mark.parametrize("name", HEADS)
def test_teachers_give_their_scores_in_transformers(
    folder: Path, settings: dict[str, Any], name: str
) -> None:
    place = folder / "models" / f"00-{name}"
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    tokenizer = AutoTokenizer.from_pretrained(place)
    scores = {}
    for split in ("validation", "test"):
        file = Path(settings["task"]["data"]["path"]) / f"{split}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        given = tokenizer(
            [r["text"] for r in rows],
            truncation=True,
            max_length=32,
            padding=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            best = model(**given).logits.argmax(dim=1).tolist()
        right = [model.config.id2label[b] == r["label"] for b, r in zip(best, rows, strict=True)]
        scores[split] = sum(right) / len(right)
    fine_tune, _, evaluate = results(folder)
    [record] = [one for one in fine_tune["trained"] if one["output"] == name]
    assert record["together"] == [*HEADS]
    assert record["choosing"]["score"] == pytest.approx(scores["validation"])
    assert evaluate["models"][name]["accuracy"] == pytest.approx(scores["test"])
    assert scores["test"] > evaluate["baseline"]["accuracy"]


def test_the_epoch_with_the_best_mean_is_kept(folder: Path) -> None:
    by_epoch = zip(*(events(folder, "validation", name) for name in HEADS), strict=True)
    means = [sum(event["accuracy"] for event in pair) / 2 for pair in by_epoch]
    for record in results(folder)[0]["trained"]:
        assert record["choosing"]["mean"] == pytest.approx(max(means))
        assert record["choosing"]["epoch"] == means.index(max(means))


def test_the_plan_counts_each_weight_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    labels = "task.labels=[animal, food, music, weather]"
    plan = Planner(load_recipe("recipe.yaml", [labels]), GPUS["h100"], 1).plan()
    [job, of_student] = plan.jobs
    assert (job.models, of_student.models) == ([TOGETHER], ["student"])
    numel = -sum(weight.numel() for weight in head(folder, "reads").values())
    for name in HEADS:
        weights = load_file(folder / "models" / f"00-{name}" / "model.safetensors")
        numel += sum(weight.numel() for weight in weights.values())
    assert job.chosen.states.optimizer == 8 * numel, "Adam's two moments"
    alone = load_recipe("recipe.yaml", [labels, "phases.fine-tune.shared_head=false"])
    each = Planner(alone, GPUS["h100"], 1).plan().jobs[:2]
    assert job.chosen.activations == sum(one.chosen.activations for one in each)


class Killed(Exception):
    """In place of a kill, in this process."""


def test_a_killed_training_ends_as_if_left_alone(
    settings: dict[str, Any],
    in_this_process: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed within an epoch, and once more when one of the two models is in its place."""
    file = tmp_path / "together.yaml"
    file.write_text(yaml.safe_dump({**settings, "phases": settings["phases"][:1]}))
    recipe = load_recipe(file, ["training.epochs=2", "training.dropout=0.2"])
    run_recipe(recipe, tmp_path / "whole")
    folder = tmp_path / "killed"

    def dies_at_step_20(training: Any, epoch: int, step: tuple[int, Any]) -> Any:
        if step[0] == 20:
            raise Killed
        return collate(training, epoch, step)

    def dies_between_models(run: RunFolder, number: int, name: str, outputs: Any) -> None:
        publish(run, number, name, outputs[:1])
        raise Killed

    collate, publish = _Training._collate, RunFolder._publish
    with monkeypatch.context() as planted, pytest.raises(Killed):
        planted.setattr(_Training, "_collate", dies_at_step_20)
        run_recipe(recipe, folder)
    assert events(folder, "validation", "reads") and not (folder / "models").exists()
    with monkeypatch.context() as planted, pytest.raises(Killed):
        planted.setattr("shutil.rmtree", lambda *given, **options: None)
        planted.setattr(RunFolder, "_publish", dies_between_models)
        run_recipe(recipe, folder, resume=True)
    assert [path.name for path in (folder / "models").iterdir()] == ["00-reads"]
    run_recipe(recipe, folder, resume=True)
    for name in HEADS:
        weights = [
            load_file(run / "models" / f"00-{name}" / "model.safetensors")
            for run in (folder, tmp_path / "whole")
        ]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weight, weights[1][key]) for key, weight in weights[0].items())
    for event, phase in [("train", TOGETHER), ("validation", "reads"), ("validation", "spells")]:
        found = (events(run, event, phase) for run in (folder, tmp_path / "whole"))
        told = [
            [(one["step"], one.get("loss"), one.get("accuracy")) for one in of_run]
            for of_run in found
        ]
        assert told[0] == told[1], phase
    assert not (folder / "checkpoints").exists()
