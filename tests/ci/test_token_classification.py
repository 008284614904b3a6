"""A token classification recipe: two teachers that cut words unlike each other, by command, in one
process at stage 0 and on two ranks at stage 3, with cached and with live teachers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import seqeval.metrics
import torch
from runs import (
    check_same_losses_on_two_ranks,
    evaluation,
    losses,
    run_here,
)
from toys import TOY_TAGS, make_tiny_bert, toy_words_task
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from ds_distill import predict
from ds_distill.data.open_source import open_source
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import word_windows
from ds_distill.recipe.tasks import TokenClassification


@pytest.fixture(scope="module")
def settings(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("words")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    spells = make_tiny_bert(root / "spells", [*special, *letters, *(f"##{x}" for x in letters)])
    distil = {
        "split": "transfer",
        "epochs": 3,
        "losses": {"kl": {"temperature": 2.0}, "hidden_mse": {"weight": 0.1}},
    }
    return {
        "name": "words",
        "task": toy_words_task(root / "data", subwords="all"),
        "teachers": {
            "reads": {"model": str(tiny_models["toy"])},
            "spells": {"model": str(spells)},
        },
        "student": {"model": str(tiny_models["toy"]), "layers": [0]},
        "training": {"batch_size": 16, "learning_rate": 6.0e-3, "dropout": 0.0},
        "phases": [
            {"fine-tune": {"models": ["reads", "spells"], "epochs": 6}},
            {"cache": {"splits": ["transfer", "validation"], "hidden": [-1], "dtype": "float32"}},
            {"expertise": {}},
            {"distil": {**distil, "teachers": "cached", "routing": ["average", "gate"]}},
            {"distil": {**distil, "name": "live", "routing": "average", "save_as": "live"}},
            {"evaluate": {"split": "test"}},
        ],
        "logging": {"every": 1},
        "deepspeed": "zero0_fp32",
    }


@pytest.fixture(scope="module")
def run(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(settings, tmp_path_factory.mktemp("token-classification"))


def test_live_teachers_give_the_losses_of_cached_ones(run: Path) -> None:
    cached, live = (losses(run, phase) for phase in ("average", "live"))
    assert len(cached) == len(live) > 10
    assert live == pytest.approx(cached, rel=1e-4)


@pytest.mark.parametrize("phase", ["reads", "spells", "average", "gate", "live"])
def test_losses_on_two_ranks_at_stage_3_are_those_on_one_at_stage_0(
    short_runs: dict[int, Path], phase: str
) -> None:
    check_same_losses_on_two_ranks(short_runs, phase)


def rows_of_test(settings: dict[str, Any]) -> list[dict[str, Any]]:
    file = Path(settings["task"]["data"]["path"]) / "test.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def windows_of_test(settings: dict[str, Any], folder: Path) -> datasets.Dataset:
    """Test as the models of the recipe read it."""
    task = TokenClassification.model_validate(settings["task"])
    split = open_source(task, cache_folder=folder).read("test")
    models = [teacher["model"] for teacher in settings["teachers"].values()]
    tokenizers = [load_tokenizer(model, of_words=True) for model in models]
    return word_windows(split, tokenizers, task.max_length)


def test_scores_are_of_entities(run: Path, settings: dict[str, Any]) -> None:
    record = evaluation(run)
    models = record["models"]
    assert record["metric"] == "entity_f1" and {"reads", "average", "gate", "live"} <= set(models)
    assert set(models["reads"]["per_class"]) == {"animal", "food"}
    assert models["reads"]["entity_f1"] > 0.8 and record["baseline"]["entity_f1"] == 0
    assert models["average"]["entity_f1"] > 0.3
    rows = rows_of_test(settings)
    assert {model["examples"] for model in models.values()} == {len(rows)}
    words = sum(len(row["tokens"]) for row in rows)
    counts = {(model["words"], model["words_without_token"]) for model in models.values()}
    assert counts == {(words, 0)}, "the long sentence is scored whole"
    page = (run / "report.html").read_text()
    assert "entity F1" in page and " words have no token that all models" in page


def test_the_student_scores_the_same_in_transformers(
    run: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    """In the windows that every model reads, each word where it has most around it."""
    folder = run / "student"
    found = json.loads((run / "results.json").read_text())
    expected = evaluation(run)["models"][found["student"]]
    model = AutoModelForTokenClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [model.config.id2label[number] for number in range(len(TOY_TAGS))] == TOY_TAGS
    rows, windows = rows_of_test(settings), windows_of_test(settings, tmp_path)
    assert len(windows) > len(rows)
    predicted: list[list[str]] = [[] for _ in rows]
    for window in windows:
        encoded = tokenizer(window["words"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            best = model(**encoded).logits[0].argmax(dim=1).tolist()
        of_word = encoded.word_ids(0)
        for at, owned in enumerate(window["owned"]):
            predicted[window["number"]] += [TOY_TAGS[best[of_word.index(at)]]] if owned else []
    truth = [row["tags"] for row in rows]
    assert seqeval.metrics.f1_score(truth, predicted) == pytest.approx(expected["entity_f1"])


def test_the_student_finds_entities_in_text(run: Path) -> None:
    text = "we saw a tiger, and some soup"
    [found] = predict(run, [text])
    for entity in found["predicted"]:
        assert text[entity["start"] : entity["end"]] == entity["text"]
    assert {"tiger", "soup"} & {entity["text"] for entity in found["predicted"]}
    tag = pipeline("token-classification", str(run / "student"))
    assert {one["start"] for one in tag(text)} >= {one["start"] for one in found["predicted"]}
