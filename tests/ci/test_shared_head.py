"""Teachers that are trained together through one head: two of unlike tokenizers, and then the
student that MT-BERT makes of them. test_two_ranks.py has them sharded."""

from pathlib import Path

import pytest
import torch
from kinds import json_lines
from runs import curves, digests, interrupted, logged, others, results, run_here, written
from safetensors.torch import load_file
from toys import recipe_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ds_distill import load_recipe, run_recipe
from ds_distill.models.configuration import CLASSIFIER_HEADS
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner
from ds_distill.run.folder import RunFolder
from ds_distill.training.loop import _Training

TOGETHER = "reads+spells"
HEADS = ("reads", "spells")


@pytest.fixture(scope="module")
def settings(materials):
    return recipe_of("together", materials=materials)


@pytest.fixture(scope="module")
def folder(settings, tmp_path_factory):
    return run_here(settings, tmp_path_factory.mktemp("together"))


def head(folder, name):
    weights = load_file(folder / "models" / f"00-{name}" / "model.safetensors")
    layers = zip(("pooling", "prediction"), CLASSIFIER_HEADS["bert"], strict=True)
    return {f"{as_}.{w}": weights[f"{at}.{w}"] for as_, at in layers for w in ("weight", "bias")}


def test_teachers_have_one_head_and_the_sum_of_their_losses(folder):
    reads, spells = (head(folder, name) for name in HEADS)
    assert [list(one.shape) for one in reads.values()] == [[32, 32], [32], [4, 32], [4]]
    for name, weight in reads.items():
        torch.testing.assert_close(spells[name], weight, rtol=0, atol=0)
    first = logged(folder, "train", TOGETHER)[0]
    parts = [first[f"{name}/cross_entropy"] for name in HEADS]
    assert first["loss"] == pytest.approx(sum(parts)) and min(parts) > 0.5


@pytest.mark.parametrize("name", HEADS)
def test_teachers_give_their_scores_in_transformers(folder, settings, name):
    place = folder / "models" / f"00-{name}"
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    tokenizer = AutoTokenizer.from_pretrained(place)
    scores = {}
    for split in ("validation", "test"):
        file = Path(settings["task"]["data"]["path"]) / f"{split}.jsonl"
        rows = json_lines(file)
        how = {"truncation": True, "max_length": 32, "padding": True, "return_tensors": "pt"}
        given = tokenizer([row["text"] for row in rows], **how)
        with torch.no_grad():
            best = model(**given).logits.argmax(dim=1).tolist()
        right = [model.config.id2label[b] == r["label"] for b, r in zip(best, rows, strict=True)]
        scores[split] = sum(right) / len(right)
    fine_tune, _, evaluate = results(folder)["phases"]
    [record] = [one for one in fine_tune["trained"] if one["output"] == name]
    assert record["together"] == [*HEADS]
    assert record["choosing"]["score"] == pytest.approx(scores["validation"])
    assert evaluate["models"][name]["accuracy"] == pytest.approx(scores["test"])
    assert scores["test"] > evaluate["baseline"]["accuracy"]


def test_the_epoch_with_the_best_mean_is_kept(folder):
    by_epoch = zip(*(logged(folder, "validation", name) for name in HEADS), strict=True)
    means = [sum(event["accuracy"] for event in pair) / 2 for pair in by_epoch]
    for record in results(folder)["phases"][0]["trained"]:
        assert record["choosing"]["mean"] == pytest.approx(max(means))
        assert record["choosing"]["epoch"] == means.index(max(means))


def test_the_plan_counts_each_weight_once(folder, monkeypatch):
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


def test_a_killed_training_ends_as_if_left_alone(settings, in_this_process, tmp_path, monkeypatch):
    """Killed within an epoch, and once more when one of the two models is in its place."""
    file = written({**settings, "phases": settings["phases"][:1]}, tmp_path)
    recipe = load_recipe(file, ["training.epochs=2", "training.dropout=0.2"])
    run_recipe(recipe, whole := tmp_path / "whole")
    folder, publish = tmp_path / "killed", RunFolder.publish_models

    def between_models(run, number, name, epoch, records):
        publish(run, number, name, epoch, dict([*records.items()][:1]))
        return True

    with interrupted(_Training, "_collate", lambda training, epoch, step: step[0] == 20):
        run_recipe(recipe, folder)
    assert logged(folder, "validation", "reads") and not (folder / "models").exists()
    with monkeypatch.context() as planted, interrupted(RunFolder, "publish_models", between_models):
        planted.setattr("shutil.rmtree", lambda *given, **options: None)
        run_recipe(recipe, folder, resume=True)
    assert [path.name for path in (folder / "models").iterdir()] == ["00-reads"]
    run_recipe(recipe, folder, resume=True)
    assert digests(folder) == digests(whole) and len(digests(whole)) > len(HEADS)
    assert curves(folder) == curves(whole) and others(folder) == others(whole)
    assert not (folder / "checkpoints").exists()
