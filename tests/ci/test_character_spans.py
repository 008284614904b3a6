"""A recipe of character spans: two teachers that cut words unlike each other, by command, in one
process at stage 0 and on two ranks at stage 3, with cached and with live teachers. Contexts are
longer than a window."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    evaluation,
    losses,
    run_here,
)
from sklearn.metrics import f1_score
from toys import TOY_FILLERS, TOY_WORDS, make_tiny_bert
from transformers import AutoModelForTokenClassification

from ds_distill import predict
from ds_distill.data.open_source import open_source
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import word_windows
from ds_distill.recipe.tasks import CharacterSpans

ASKED = {"we saw": "animal", "they had": "food"}
TASK: dict[str, Any] = {"type": "character-spans", "max_length": 64}


def write_task(folder: Path) -> Path:
    """A context has up to three animals and foods, some of two words; a question asks for all of
    one kind. One context of test has a word that no tokenizer has a token for."""
    folder.mkdir()
    draw = random.Random(0)
    for split, size in {"train": 160, "validation": 60, "test": 60}.items():
        rows = []
        for number in range(size):
            count = draw.randint(16, 24) if number % 4 == 0 else draw.randint(2, 8)
            words = [(word, "") for word in draw.choices(TOY_FILLERS.split(), k=count)]
            for kind in draw.choices(["animal", "food"], k=draw.randint(0, 3)):
                found = " ".join(draw.choices(TOY_WORDS[kind].split(), k=draw.randint(1, 2)))
                words.insert(draw.randint(0, len(words)), (found, kind))
            if (split, number) == ("test", 1):
                words.insert(1, ("\u200b", ""))
            question, asked = draw.choice(list(ASKED.items()))
            context = " ".join(word for word, _ in words)
            answers = []
            for at, (word, kind) in enumerate(words):
                start = len(" ".join([*(before for before, _ in words[:at]), ""]))
                if kind == asked:
                    answers.append({"start": start, "end": start + len(word)})
            rows.append({"question": question, "context": context, "answers": answers})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def settings(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("spans")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    spells = make_tiny_bert(root / "spells", [*special, *letters, *(f"##{x}" for x in letters)])
    distil = {
        "epochs": 8,
        "losses": {
            "kl": {"temperature": 2.0},
            "cross_entropy": {"weight": 0.5},
            "hidden_mse": {"weight": 0.1},
            "teacher_cross_entropy": {},
        },
    }
    return {
        "name": "spans",
        "task": {**TASK, "data": {"path": str(write_task(root / "data"))}},
        "teachers": {
            "reads": {"model": str(tiny_models["toy"])},
            "spells": {"model": str(spells)},
        },
        "student": {"model": str(tiny_models["toy"]), "layers": [0]},
        "seed": 1,
        "training": {"batch_size": 16, "learning_rate": 6.0e-3, "dropout": 0.0},
        "phases": [
            {"fine-tune": {"models": ["reads", "spells"], "epochs": 6}},
            {"cache": {"splits": ["train", "validation"], "hidden": [-1], "dtype": "float32"}},
            {"expertise": {}},
            {"distil": {**distil, "teachers": "cached", "routing": ["average", "expertise"]}},
            {"distil": {**distil, "name": "live", "routing": "average", "save_as": "live"}},
            {"evaluate": {"split": "test"}},
        ],
        "logging": {"every": 1},
        "deepspeed": "zero0_fp32",
    }


@pytest.fixture(scope="module")
def run(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(settings, tmp_path_factory.mktemp("character-spans"))


def test_live_teachers_give_the_losses_of_cached_ones(run: Path) -> None:
    cached, live = (losses(run, phase) for phase in ("average", "live"))
    assert len(cached) == len(live) > 10
    assert live == pytest.approx(cached, rel=1e-4)


def test_scores_are_of_characters(run: Path) -> None:
    record = evaluation(run)
    models = record["models"]
    assert (record["over"], record["metric"]) == ("characters", "character_f1")
    assert set(models) == {"reads", "spells", "average", "expertise", "live"}
    assert {model["examples"] for model in models.values()} == {60}
    assert {model["words_without_token"] for model in models.values()} == {1}
    assert models["reads"]["windows"] > 60
    baseline = record["baseline"]  # every word
    assert baseline["character_recall"] > 0.99 and 0.1 < baseline["character_f1"] < 0.3
    assert models["reads"]["character_f1"] > 0.5 and models["expertise"]["character_f1"] > 0.4
    page = (run / "report.html").read_text()
    assert "character F1" in page and "span F1" in page
    assert "read in" in page and "have no token that all models read" in page
    routing = json.loads((run / "routing.json").read_text())
    assert (routing["over"], routing["metric"]) == ("characters", "character_f1")


def test_the_student_scores_the_same_in_transformers(
    run: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Character by character, by scikit-learn."""
    record = evaluation(run)
    shipped = json.loads((run / "results.json").read_text())["student"]
    model = AutoModelForTokenClassification.from_pretrained(run / "student")
    tokenizers = [
        load_tokenizer(teacher["model"], of_words=True) for teacher in settings["teachers"].values()
    ]
    split = open_source(
        CharacterSpans.model_validate(settings["task"]), cache_folder=tmp_path
    ).read("test")
    truth = [np.zeros(len(row["text_b"]), dtype=bool) for row in split]
    seen = [np.zeros(len(row["text_b"]), dtype=bool) for row in split]
    for marked, row in zip(truth, split, strict=True):
        for answer in row["answers"]:
            marked[answer["start"] : answer["start"] + len(answer["text"])] = True
    before: dict[int, dict[int, int]] = {}  # question -> words inside -> their last character
    for row in word_windows(split, tokenizers, TASK["max_length"]):
        encoded = tokenizers[0](
            row["question"], row["words"], is_split_into_words=True, return_tensors="pt"
        )
        parts, words = encoded.sequence_ids(0), encoded.word_ids(0)
        with torch.no_grad():
            inside = model(**encoded).logits[0].argmax(dim=1).tolist()
        ends = before.setdefault(row["number"], {})
        for at, counts in enumerate(np.logical_and(row["counted"], row["owned"])):
            if not counts:
                continue
            [token, *_] = (n for n, word in enumerate(words) if word == at and parts[n] == 1)
            if inside[token]:
                number = row["first"] + at
                start, end = row["starts"][at], row["ends"][at]
                seen[row["number"]][ends.get(number - 1, start) : end] = True
                ends[number] = end
    expected = record["models"][shipped]["character_f1"]
    assert f1_score(np.concatenate(truth), np.concatenate(seen)) == pytest.approx(expected)


def test_the_student_finds_spans_in_a_context(
    run: Path,
    ds_distill: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = "the day and " * 18 + "tiger again"  # of two windows
    [found] = predict(run, [("we saw", context)])
    assert "tiger" in {span["text"] for span in found["predicted"]}
    for span in found["predicted"]:
        assert context[span["start"] : span["end"]] == span["text"]
    card = (run / "student" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("Who wrote it?", "we saw").replace('"Somebody wrote it. " * 1000', "text")
    monkeypatch.chdir(run / "student")
    exec(code, {"text": context})
    assert "tiger" in capsys.readouterr().out
