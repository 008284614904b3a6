"""A masked-LM recipe by command, in one process and on two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import results
from transformers import pipeline


@pytest.fixture(scope="module")
def runs(
    masked_lm_settings: dict[str, Any], ds_distill: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Ranks -> the folder of a run."""
    root = tmp_path_factory.mktemp("masked-lm")
    (root / "mlm.yaml").write_text(yaml.safe_dump(masked_lm_settings, sort_keys=False))
    commands = {
        1: ["run", "mlm.yaml"],
        2: ["launch", "mlm.yaml", "--num-gpus", "2", "deepspeed=zero3_fp32", "training.epochs=1"],
    }
    for ranks, command in commands.items():
        done = ds_distill(*command, "--folder", root / str(ranks), cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr
    return {ranks: root / str(ranks) for ranks in commands}


def losses(folder: Path) -> list[tuple[str, int, float, float]]:
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        (event["phase"], event["step"], event["cross_entropy"], event.get("kl", 0.0))
        for event in events
        if event["event"] == "train"
    ]


def test_teacher_and_student_learn_to_predict_the_masked_tokens(
    runs: dict[int, Path], masked_lm_settings: dict[str, Any]
) -> None:
    found = results(runs[1])
    models = found["phases"][-1]["models"]
    assert {name: model["role"] for name, model in models.items()} == {
        "bert": "teacher",
        "student": "student",
    }
    for model in models.values():
        assert model["accuracy"] > 0.5, "of thirty words one is right by chance"
        assert model["perplexity"] == pytest.approx(math.exp(model["loss"]))
        assert model["examples"] == 60 and 60 < model["tokens"] < 180  # 8.5 words, 20% hidden
    [comparison] = found["phases"][-1]["comparisons"]
    assert comparison["interval"][0] <= comparison["difference"] <= comparison["interval"][1]
    assert found["verdict"].count("masked tokens of test") == 1
    # Thirty words, each about as frequent: nobody who does not read tells more than one in ten.
    baseline = found["phases"][-1]["baseline"]
    assert baseline["accuracy"] < 0.1 and 25 < baseline["perplexity"] < 40
    assert baseline["tokens"] == models["bert"]["tokens"] and baseline["split"] == "train"
    lines = (Path(masked_lm_settings["task"]["data"]["path"]) / "train.txt").read_text().split()
    assert lines.count(baseline["answer"]) == max(map(lines.count, set(lines)))
    assert "perplexity" in (runs[1] / "report.html").read_text()


def test_two_ranks_with_sharded_models_see_the_same_masks(runs: dict[int, Path]) -> None:
    one, two = losses(runs[1]), losses(runs[2])
    assert (len(one), len(two)) == (2 * 4 * 15, 2 * 15)  # models, epochs, steps
    assert two[0][:2] == one[0][:2] == ("bert", 1)
    assert two[0][2:] == pytest.approx(one[0][2:], rel=1e-5), "before the first update"
    evaluated = [results(folder)["phases"][-1]["models"] for folder in runs.values()]
    for model in ("bert", "student"):
        assert evaluated[0][model]["tokens"] == evaluated[1][model]["tokens"]


def test_the_shipped_student_fills_masks(runs: dict[int, Path]) -> None:
    fill = pipeline("fill-mask", model=str(runs[1] / "student"))
    assert type(fill.model).__name__ == "BertForMaskedLM"
    assert len(fill.model.bert.encoder.layer) == 1
    guesses = [
        fill(f"{word} {word} {word} [MASK] {word} {word}")[0]["token_str"]
        for word in ("cat", "bread", "snow", "tiger", "soup", "wind")
    ]
    matches = sum(
        guess == word
        for guess, word in zip(
            guesses, ("cat", "bread", "snow", "tiger", "soup", "wind"), strict=True
        )
    )
    assert matches >= 3, guesses
    head = fill.model.cls.predictions.decoder.weight
    assert torch.equal(head, fill.model.get_input_embeddings().weight)
    assert "pipeline_tag: fill-mask" in (runs[1] / "student" / "README.md").read_text()
