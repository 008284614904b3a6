"""The commands as a user types them, and what a run leaves."""

from __future__ import annotations

import csv
import json
import random

import pytest
import yaml
from e2e.test_cli import predictions
from runs import results

ONE_PHASE = {
    "teachers": {},
    "phases": [{"fine-tune": {"models": "student", "epochs": 2}}, {"evaluate": {"split": "test"}}],
}


def test_a_csv_runs(toy_settings, toy_task, tmp_path, ds_distill):
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "validation", "test"):
        rows = [json.loads(line) for line in (toy_task / f"{split}.jsonl").read_text().splitlines()]
        with open(data / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            pairs = [(row["text"], row["label"]) for row in rows]
            csv.writer(file).writerows([("text", "label"), *pairs])
    settings = {**toy_settings, **ONE_PHASE, "task": {"data": {"path": "data"}, "max_length": 32}}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(settings))
    done = ds_distill("run", "toy.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "runs" / "toy")["phases"][-1]["models"]
    assert set(found["student"]["per_class"]) == {"animal", "food", "weather"}


def test_pairs_of_texts_run(toy_settings, tmp_path, ds_distill):
    """What is the second text about? The first says nothing of it."""
    draw = random.Random(0)
    words = {"animal": ["cat", "dog", "horse"], "weather": ["rain", "snow", "wind"]}
    data = tmp_path / "data"
    data.mkdir()
    for split, size in (("train", 240), ("validation", 60), ("test", 60)):
        with open(data / f"{split}.jsonl", "w") as file:
            for _ in range(size):
                first, second = draw.choice([*words]), draw.choice([*words])
                row = {
                    "text_a": " ".join(draw.choices(words[first], k=2)),
                    "text_b": " ".join(draw.choices(words[second], k=2)),
                    "label": second,
                }
                file.write(json.dumps(row) + "\n")
    settings = {
        **toy_settings,
        **ONE_PHASE,
        "task": {"data": {"path": "data"}, "max_length": 32},
        "student": {"model": toy_settings["student"]["model"]},
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(settings))
    done = ds_distill("run", "toy.yaml", "phases.0.epochs=12", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "toy"
    found = results(folder)["phases"][-1]["models"]["student"]
    assert found["accuracy"] > 0.8, "the second text tells"
    card = (folder / "student" / "README.md").read_text()
    assert "text_pair" in card, "though the recipe names no column"
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
    guesses = predictions(
        folder / "student", [row["text_a"] for row in rows], [row["text_b"] for row in rows]
    )
    right = sum(guess == row["label"] for guess, row in zip(guesses, rows, strict=True))
    assert right / len(rows) == pytest.approx(found["accuracy"])
