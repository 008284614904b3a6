"""An extractive QA recipe: two teachers with one tokenizer, cached and live, by command, in one
process at stage 0 and on two ranks at stage 3. Contexts are longer than a window."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    evaluation,
    losses,
    run_here,
)
from toys import TOY_FILLERS, TOY_WORDS
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from ds_distill.data.batches import Examples
from ds_distill.data.open_source import open_source
from ds_distill.data.windows import question_windows
from ds_distill.predictors.prediction import load_predictor, predict
from ds_distill.recipe.metrics.answers import word_f1
from ds_distill.recipe.tasks import ExtractiveQA

ASKED = {"we saw": "animal", "they had": "food"}
TASK: dict[str, Any] = {"type": "extractive-qa", "max_length": 32, "stride": 8}

SIZES = {"train": 240, "validation": 20, "test": 60, "transfer": 200}
"""Questions of each split."""


def write_task(folder: Path) -> Path:
    """A context has an animal and a food, and some are two words; a question asks for one."""
    folder.mkdir()
    draw = random.Random(0)
    for split, size in SIZES.items():
        rows = []
        for number in range(size):
            count = draw.randint(24, 40) if number % 10 == 0 else draw.randint(2, 8)
            words = draw.choices(TOY_FILLERS.split(), k=count)
            found = {}
            for kind in draw.sample(["animal", "food"], k=2):
                found[kind] = " ".join(draw.choices(TOY_WORDS[kind].split(), k=draw.randint(1, 2)))
                words.insert(draw.randint(0, len(words)), found[kind])
            question, kind = draw.choice(list(ASKED.items()))
            context = " ".join(words)
            answer = {"text": found[kind], "start": context.index(found[kind])}
            answers = {} if split == "transfer" else {"answers": [answer]}
            rows.append({"question": question, "context": context, **answers})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def settings(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("questions")
    toy = {"model": str(tiny_models["toy"])}
    losses = {"kl": {"temperature": 2.0}, "hidden_mse": {"weight": 0.1}}
    distil = {"split": "transfer", "epochs": 5, "losses": losses, "routing": "average"}
    live = {"name": "live", "teachers": "live", "save_as": "live"}
    return {
        "name": "questions",
        "task": {**TASK, "data": {"path": str(write_task(root / "data"))}},
        "teachers": {"first": toy, "second": toy},
        "student": {**toy, "layers": [0]},
        "training": {"batch_size": 16, "learning_rate": 6.0e-3, "dropout": 0.0},
        "phases": [
            {"fine-tune": {"models": ["first"], "epochs": 7}},
            {"fine-tune": {"name": "again", "models": ["second"], "epochs": 5}},
            {"cache": {"splits": "transfer", "hidden": [-1], "dtype": "float32"}},
            {"distil": {**distil, **live}},
            {"distil": {**distil, "teachers": "cached"}},
            {"evaluate": {"split": "test"}},
        ],
        "logging": {"every": 1},
        "deepspeed": "zero0_fp32",
    }


@pytest.fixture(scope="module")
def run(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(settings, tmp_path_factory.mktemp("extractive-qa"))


def test_live_teachers_give_the_losses_of_cached_ones(run: Path) -> None:
    cached, live = (losses(run, phase) for phase in ("student", "live"))
    assert len(cached) == len(live) > 10
    assert live == pytest.approx(cached, rel=1e-4)


def test_scores_are_of_questions(run: Path) -> None:
    record = evaluation(run)
    models = record["models"]
    assert record["metric"] == "squad_f1" and set(models) == {"first", "second", "student", "live"}
    assert {model["examples"] for model in models.values()} == {60}
    assert {model["windows"] for model in models.values()} == {record["baseline"]["windows"]}
    assert models["first"]["windows"] > 60
    uses = json.loads((run / "results.json").read_text())["uses"]
    assert {(use["split"], use["examples"]) for use in uses} == set(SIZES.items()), "no windows"
    assert models["first"]["squad_f1"] > 0.7 > record["baseline"]["squad_f1"] + 0.4
    assert models["student"]["squad_f1"] > 0.4
    for model in models.values():
        assert model["strict_accuracy"] <= model["mrr"] <= model["lenient_accuracy"]
    page = (run / "report.html").read_text()
    assert "SQuAD F1" in page and "exact match" in page


def test_the_student_answers_the_same_in_transformers(
    run: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Every span of every window, one after the other."""
    folder = run / "student"
    model = AutoModelForQuestionAnswering.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = ExtractiveQA.model_validate(settings["task"])
    split = open_source(task, cache_folder=tmp_path).read("test")
    prepared = question_windows(split, tokenizer, task.max_length, task.overlap)
    assert len(Examples.of(prepared)) == len(prepared)
    best: dict[int, tuple[float, str]] = {}
    for row in prepared:
        encoded = tokenizer(
            row["text"], row["text_b"], return_offsets_mapping=True, return_tensors="pt"
        )
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            found = model(**encoded)
        starts, ends = found.start_logits[0].tolist(), found.end_logits[0].tolist()
        inside = [at for at, part in enumerate(encoded.sequence_ids(0)) if part == 1]
        for i in inside:
            for j in (j for j in inside if i <= j < i + task.max_answer_length):
                answer = row["text_b"][offsets[i][0] : offsets[j][1]]
                span = starts[i] + ends[j], answer
                best[row["question"]] = max(best.get(row["question"], span), span)
    values = [
        max(word_f1(best[number][1], right["text"]) for right in row["answers"])
        for number, row in enumerate(split)
    ]
    expected = evaluation(run)["models"]["student"]["squad_f1"]
    assert sum(values) / len(values) == pytest.approx(expected)


def test_the_lines_of_the_model_card_and_predict_answer_a_question(
    run: Path,
    settings: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = (run / "student" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("Who wrote it?", "we saw").replace("Somebody wrote it. ", "the day ")
    code = code.replace('" * 1000', '" * 60 + "tiger again"')
    monkeypatch.chdir(run / "student")
    exec(code, {})
    assert "tiger" in capsys.readouterr().out
    context = "the day " * 60 + "tiger again"
    [found] = predict(run, [("we saw", context)])
    assert load_predictor(run).overlap == settings["task"]["stride"] == 8
    best = found["candidates"][0]
    assert "tiger" in found["predicted"] == context[best["start"] : best["end"]]
