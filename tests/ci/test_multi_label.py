"""A multi-label recipe: two experts of different labels, in one process and on two ranks, with
cached and with live teachers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from runs import check_same_losses_on_two_ranks, losses, results, run_here
from toys import TOY_FILLERS, TOY_WORDS
from transformers import AutoModelForSequenceClassification

from ds_distill.routing.multi_label import FittedByLabel, load_fitted

LABELS = ["animal", "food", "weather"]


def write_task(folder: Path) -> Path:
    """Texts with a word of each of their labels, of which some have none."""
    folder.mkdir()
    draw = random.Random(0)
    for split, size in {"train": 240, "validation": 80, "test": 80, "transfer": 240}.items():
        with open(folder / f"{split}.jsonl", "w") as file:
            for _ in range(size):
                labels = [label for label in LABELS if draw.random() < 0.4]
                words = [draw.choice(TOY_WORDS[label].split()) for label in labels]
                words += draw.choices(TOY_FILLERS.split(), k=draw.randint(3, 6))
                draw.shuffle(words)
                row: dict[str, Any] = {"text": " ".join(words)}
                if split != "transfer":
                    row["labels"] = labels
                file.write(json.dumps(row) + "\n")
    (folder / "labels.json").write_text(json.dumps(LABELS))
    return folder


@pytest.fixture(scope="module")
def settings(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("labels")
    model = str(tiny_models["toy"])
    data = str(write_task(root / "data"))
    knows = {"first": ["animal"], "second": ["food", "weather"]}
    splits: dict[str, Any] = {split: split for split in ("train", "validation", "test", "transfer")}
    for name, labels in knows.items():  # an expert was never told of the other labels
        mapping = {label: label if label in labels else None for label in LABELS}
        there = {"path": data, "split": "train", "columns": {"label": "labels"}}
        splits[f"of-{name}"] = {**there, "labels": mapping}
    teach = [
        {"fine-tune": {"name": f"teach-{name}", "models": name, "split": f"of-{name}"}}
        for name in knows
    ]
    distil = {"split": "transfer", "epochs": 2, "losses": {"kl": {"temperature": 2.0}}}
    return {
        "name": "labels",
        "task": {
            "type": "multi-label",
            "data": {"path": data, "columns": {"label": "labels"}, "splits": splits},
            "max_length": 16,
        },
        "teachers": {"first": {"model": model}, "second": {"model": model}},
        "student": {"model": model, "layers": [0]},
        "training": {
            "batch_size": 16,
            "learning_rate": 3.0e-3,
            "epochs": 16,
            "dropout": 0.0,
        },
        "phases": [
            *teach,
            {"cache": {"splits": ["transfer", "validation"], "hidden": [-1], "dtype": "float32"}},
            {"expertise": {}},
            {"distil": {**distil, "teachers": "cached", "routing": ["average", "expertise"]}},
            {"distil": {**distil, "name": "live", "routing": "average", "save_as": "live"}},
            {
                "fine-tune": {
                    "name": "control",
                    "models": "student",
                    "save_as": "labels-only",
                    "epochs": 8,
                }
            },
            {"evaluate": {"split": "test"}},
        ],
        "logging": {"every": 1},
        "deepspeed": "zero1_fp32",
    }


@pytest.fixture(scope="module")
def run(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(settings, tmp_path_factory.mktemp("multi-label"))


def test_the_table_names_the_expert_of_each_label(run: Path) -> None:
    [record] = (r for r in results(run)["phases"] if r["kind"] == "expertise")
    assert record["experts"] == {"animal": "first", "food": "second", "weather": "second"}
    assert record["f1"]["first"]["animal"] > 0.7 > 0.1 > record["f1"]["second"]["animal"]
    fitted = load_fitted(run / "routing.safetensors")
    assert isinstance(fitted, FittedByLabel) and fitted.experts == record["experts"]


def test_scores_are_over_labels(run: Path) -> None:
    found = results(run)
    [record] = (r for r in found["phases"] if r["kind"] == "evaluate")
    assert record["metric"] == "micro_f1"
    models = record["models"]
    assert {"first", "second", "average", "expertise", "live", "labels-only"} == set(models)
    assert set(models["first"]["per_class"]) == set(LABELS)
    assert models["labels-only"]["micro_f1"] > record["baseline"]["micro_f1"]
    assert models["second"]["per_class"]["food"] > 0.7 > models["first"]["per_class"]["food"]
    assert "micro F1" in found["verdict"]
    html = (run / "report.html").read_text()
    assert "micro F1" in html


def test_live_teachers_give_the_losses_of_cached_ones(run: Path) -> None:
    cached, live = (losses(run, phase) for phase in ("average", "live"))
    assert len(cached) == len(live) > 10
    assert live == pytest.approx(cached, rel=1e-4)


@pytest.mark.parametrize("phase", ["first", "average", "expertise", "live", "labels-only"])
def test_losses_on_two_ranks_at_stage_3_are_those_on_one_at_stage_0(
    short_runs: dict[int, Path], phase: str
) -> None:
    check_same_losses_on_two_ranks(short_runs, phase)


def test_two_ranks_fit_what_one_does(short_runs: dict[int, Path]) -> None:
    one, two = (load_fitted(folder / "routing.safetensors") for folder in short_runs.values())
    assert isinstance(one, FittedByLabel) and isinstance(two, FittedByLabel)
    assert one.experts == two.experts


def test_the_student_is_one_for_transformers(run: Path) -> None:
    student = AutoModelForSequenceClassification.from_pretrained(run / "student")
    assert student.config.problem_type == "multi_label_classification"
    assert list(student.config.id2label.values()) == LABELS
