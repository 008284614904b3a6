"""The built-in recipes: all load, and the thesis's runs end to end with tiny models on the real
tweets, three teachers with three tokenizers together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from unit.test_recipes_builtin import STUDENTS, TEACHERS, models_folder, runs  # noqa: F401

from ds_distill.recipe import Recipe


@pytest.mark.parametrize("teachers", ["cached", "live"])
def test_the_thesis_runs_on_real_tweets(runs: dict[str, Path], teachers: str) -> None:
    folder = runs[teachers]
    results = json.loads((folder / "results.json").read_text())
    models = results["phases"][-1]["models"]
    roles = {name: model["role"] for name, model in models.items()}
    assert roles == {
        **dict.fromkeys(TEACHERS, "teacher"),
        "fine-tuned-student": "control",
        **dict.fromkeys(STUDENTS, "student"),
    }
    labels = ["anger", "joy", "optimism", "sadness"]
    assert all(list(model["per_class"]) == labels for model in models.values())
    assert all(model["examples"] == 80 for model in models.values())
    assert results["student"] in STUDENTS
    assert (folder / "report.html").stat().st_size > 0


def test_each_teacher_read_the_tweets_in_its_own_tokens(runs: dict[str, Path]) -> None:
    tables = list((runs["cached"] / "data" / "train").glob("tokens-*.arrow"))
    # BERT's is the student's, too: DistilBERT has the same vocabulary.
    assert len(tables) == 3


def test_live_and_cached_teachers_give_the_same_losses(runs: dict[str, Path]) -> None:
    """The cache rounds logits to fp16: 1e-3 relative."""
    cached, live = distil_losses(runs["cached"]), distil_losses(runs["live"])
    assert len(cached) == 3 * 8  # students, steps: 64 tweets in batches of 8
    assert cached.keys() == live.keys()
    for step, loss in cached.items():
        assert loss == pytest.approx(live[step], rel=1e-3), step


def distil_losses(folder: Path) -> dict[tuple[str, int], float]:
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        (event["phase"], event["step"]): event["loss"]
        for event in events
        if event["event"] == "train" and event["phase"] in STUDENTS
    }


def test_the_shipped_student_loads_and_answers(runs: dict[str, Path]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = runs["cached"] / "student"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "DistilBertForSequenceClassification"
    assert model.config.id2label == {0: "anger", 1: "joy", 2: "optimism", 3: "sadness"}
    logits = model(**tokenizer("so happy to be here", return_tensors="pt")).logits
    assert logits.shape == (1, 4)
    assert torch.isfinite(logits).all()


def test_the_run_keeps_the_recipe_that_it_ran(runs: dict[str, Path]) -> None:
    written = yaml.safe_load((runs["live"] / "recipe.yaml").read_text())
    recipe = Recipe.model_validate(written)
    assert recipe.phases[6].kind == "distil" and recipe.phases[6].teachers == "live"
