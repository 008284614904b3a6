"""Teachers that are trained together through one head: two of unlike families and tokenizers, on
one rank in stage 0 and on two in stage 3, and then the student that MT-BERT makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import run_ranks
from safetensors.torch import load_file
from toys import TINY, save_tiny
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    ElectraConfig,
    ElectraModel,
)

from ds_distill import load_recipe, run_recipe
from ds_distill.models.configuration import CLASSIFIER_HEADS
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner
from ds_distill.run.folder import RunFolder
from ds_distill.training.loop import _Training

RANK = """
from ds_distill import load_recipe, run_recipe

run_recipe(load_recipe("together.yaml", ["deepspeed=zero3_fp32"]), "two")
"""
TOGETHER = "reads+spells"
HEADS = {"reads": CLASSIFIER_HEADS["bert"], "spells": CLASSIFIER_HEADS["electra"]}


def make_speller(folder: Path) -> Path:
    """An ELECTRA that reads words letter by letter: narrow embeddings, and a head of its own."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    shape = ElectraConfig(
        vocab_size=len(tokens), embedding_size=16, max_position_embeddings=64, **TINY
    )
    save_tiny(folder, ElectraModel, shape)
    ids = {token: number for number, token in enumerate(tokens)}
    BertTokenizer(vocab=ids).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(
    toy_task: Path, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    spells = make_speller(tmp_path_factory.mktemp("models") / "spells")
    losses = {"kl": {"temperature": 2.0}, "hidden_mse": {"weight": 0.1}, "cross_entropy": {}}
    return {
        "name": "together",
        "task": {"data": {"path": str(toy_task)}, "max_length": 48},
        "teachers": {
            "reads": {"model": str(tiny_models["toy"])},
            "spells": {"model": str(spells)},
        },
        "student": {"model": str(tiny_models["toy"]), "layers": [0]},
        "training": {"batch_size": 16, "learning_rate": 5.0e-3, "epochs": 4, "dropout": 0.0},
        "phases": [
            {"fine-tune": {"models": ["reads", "spells"], "shared_head": True}},
            {"distil": {"losses": losses, "routing": "mt-bert", "epochs": 2}},
            {"evaluate": {"split": "test"}},
        ],
        "logging": {"every": 1},
        "deepspeed": "zero0_fp32",
    }


@pytest.fixture(scope="module")
def folders(
    settings: dict[str, Any],
    ds_distill: Any,
    command_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, Path]:
    """Ranks -> the folder of a run."""
    root = tmp_path_factory.mktemp("together")
    (root / "together.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    done = ds_distill("run", "together.yaml", "--folder", "one", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reads, spells are trained together, through one head" in done.stdout
    (root / "rank.py").write_text(RANK)
    run_ranks(["rank.py"], 2, command_environment, root)
    return {1: root / "one", 2: root / "two"}


def events(folder: Path, event: str, phase: str) -> list[dict[str, Any]]:
    every = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one for one in every if (one["event"], one["phase"]) == (event, phase)]


def test_two_ranks_at_stage_3_give_the_losses_of_one_at_stage_0(folders: dict[int, Path]) -> None:
    for phase in (TOGETHER, "student"):
        one, two = (events(folders[ranks], "train", phase) for ranks in (1, 2))
        assert len(one) == len(two) > 10
        for name in (key for key in one[0] if key == "loss" or "cross_entropy" in key):
            ours, theirs = ([event[name] for event in of] for of in (two, one))
            assert ours[:10] == pytest.approx(theirs[:10], rel=1e-3), (phase, name)
    first = events(folders[1], "train", TOGETHER)[0]
    parts = [first[f"{name}/cross_entropy"] for name in HEADS]
    assert first["loss"] == pytest.approx(sum(parts)) and min(parts) > 0.5


def head(folder: Path, name: str) -> dict[str, torch.Tensor]:
    weights = load_file(folder / "models" / f"00-{name}" / "model.safetensors")
    layers = zip(("pooling", "prediction"), HEADS[name], strict=True)
    return {f"{as_}.{w}": weights[f"{at}.{w}"] for as_, at in layers for w in ("weight", "bias")}


def test_teachers_have_one_head(folders: dict[int, Path]) -> None:
    reads, spells, of_two = head(folders[1], "reads"), head(folders[1], "spells"), None
    assert [list(one.shape) for one in reads.values()] == [[32, 32], [32], [3, 32], [3]]
    for name, weight in reads.items():
        torch.testing.assert_close(spells[name], weight, rtol=0, atol=0)
    of_two = head(folders[2], "reads")
    assert all(torch.equal(one, head(folders[2], "spells")[n]) for n, one in of_two.items())
    assert not torch.equal(of_two["prediction.weight"], torch.zeros(3, 32))


def results(folder: Path) -> list[Any]:
    return json.loads((folder / "results.json").read_text())["phases"]


@pytest.mark.parametrize("name", HEADS)
def test_teachers_give_their_scores_in_transformers(
    folders: dict[int, Path], settings: dict[str, Any], name: str
) -> None:
    folder = folders[1] / "models" / f"00-{name}"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = {}
    for split in ("validation", "test"):
        file = Path(settings["task"]["data"]["path"]) / f"{split}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        given = tokenizer(
            [r["text"] for r in rows],
            truncation=True,
            max_length=48,
            padding=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            best = model(**given).logits.argmax(dim=1).tolist()
        right = [model.config.id2label[b] == r["label"] for b, r in zip(best, rows, strict=True)]
        scores[split] = sum(right) / len(right)
    fine_tune, _, evaluate = results(folders[1])
    [record] = [one for one in fine_tune["trained"] if one["output"] == name]
    assert record["together"] == list(HEADS)
    assert record["choosing"]["score"] == pytest.approx(scores["validation"])
    assert evaluate["models"][name]["accuracy"] == pytest.approx(scores["test"])
    assert scores["test"] > evaluate["baseline"]["accuracy"]


def test_the_epoch_with_the_best_mean_is_kept(folders: dict[int, Path]) -> None:
    by_epoch = zip(*(events(folders[1], "validation", name) for name in HEADS), strict=True)
    means = [sum(event["accuracy"] for event in pair) / 2 for pair in by_epoch]
    for record in results(folders[1])[0]["trained"]:
        assert record["choosing"]["mean"] == pytest.approx(max(means))
        assert record["choosing"]["epoch"] == means.index(max(means))


def test_the_plan_counts_each_weight_once(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[1].parent)
    labels = "task.labels=[animal, food, weather]"
    plan = Planner(load_recipe("together.yaml", [labels]), GPUS["h100"], 1).plan()
    [job, of_student] = plan.jobs
    assert (job.models, of_student.models) == ([TOGETHER], ["student"])
    numel = -sum(weight.numel() for weight in head(folders[1], "reads").values())
    for name in HEADS:
        weights = load_file(folders[1] / "models" / f"00-{name}" / "model.safetensors")
        numel += sum(weight.numel() for weight in weights.values())
    assert job.chosen.states.optimizer == 8 * numel, "Adam's two moments"
    alone = load_recipe("together.yaml", [labels, "phases.fine-tune.shared_head=false"])
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
