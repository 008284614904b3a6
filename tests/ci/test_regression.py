"""A recipe of numbers: two teachers of pairs of texts, on one rank in stage 0 and on two in stage
3, with cached and with live teachers; and all that is said of its student."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from runs import losses
from scipy import stats
from toys import TOY_FILLERS, TOY_WORDS
from transformers import AutoModelForSequenceClassification, pipeline
from typer.testing import CliRunner

from ds_distill.cache.reader import CacheReader
from ds_distill.cli import app
from ds_distill.predictors.prediction import predict

VALUES = {"animal": 1.0, "food": 0.0, "weather": -1.0}


def write_task(folder: Path) -> Path:
    """Pairs of texts; the number of a pair is 3 and what its words are worth. transfer has none."""
    folder.mkdir()
    draw = random.Random(0)
    for split, size in {"train": 160, "validation": 40, "test": 80, "transfer": 160}.items():
        with open(folder / f"{split}.jsonl", "w") as file:
            for _ in range(size):
                kinds = [draw.choice(list(VALUES)) for _ in range(4)]
                words = [draw.choice(TOY_WORDS[kind].split()) for kind in kinds]
                texts = [
                    " ".join([*words[i : i + 2], draw.choice(TOY_FILLERS.split())]) for i in (0, 2)
                ]
                row: dict[str, Any] = {"text_a": texts[0], "text_b": texts[1]}
                if split != "transfer":
                    row["label"] = 3.0 + sum(VALUES[kind] for kind in kinds) / 2
                file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def settings(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("regression")
    model = str(tiny_models["toy"])
    distil = {"split": "transfer", "losses": {"logit_mse": {}}}
    return {
        "name": "numbers",
        "task": {
            "type": "regression",
            "data": {"path": str(write_task(root / "data"))},
            "max_length": 16,
        },
        "teachers": {"first": {"model": model}, "second": {"model": model}},
        "student": {"model": model, "layers": [0]},
        "training": {"batch_size": 16, "learning_rate": 6.0e-3, "epochs": 5, "dropout": 0.0},
        "phases": [
            {"fine-tune": {"models": "first"}},
            {"fine-tune": {"models": "second", "losses": {"mse": {"weight": 0.5}}, "epochs": 3}},
            {"cache": {"splits": "transfer", "dtype": "float32"}},
            {"distil": {**distil, "teachers": "cached", "save_as": "cached"}},
            {"distil": {**distil, "name": "live", "save_as": "live"}},
            {"fine-tune": {"name": "control", "models": "student", "save_as": "control"}},
            {"evaluate": {"split": "test", "start": True}},
        ],
        "logging": {"every": 1},
        "deepspeed": "zero0_fp32",
    }


@pytest.fixture(scope="module")
def run(
    settings: dict[str, Any], ds_distill: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of the whole recipe; beside it `one.txt`, what it printed."""
    root = tmp_path_factory.mktemp("numbers")
    (root / "numbers.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    done = ds_distill("run", "numbers.yaml", "--folder", "one", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "one.txt").write_text(done.stdout)
    return root / "one"


def read(folder: Path) -> dict[str, Any]:
    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (folder / "results.json").read_text()
    found: dict[str, Any] = json.loads(text, parse_constant=strict)
    return found


@pytest.fixture(scope="module")
def data(settings: dict[str, Any]) -> Path:
    return Path(settings["task"]["data"]["path"])


def rows_of(data: Path, split: str) -> list[dict[str, Any]]:
    lines = (data / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_live_teachers_give_the_losses_of_cached_ones(run: Path) -> None:
    cached, live = losses(run, "cached"), losses(run, "live")
    assert len(cached) == 50
    assert live == pytest.approx(cached, rel=1e-4)


def test_the_cache_holds_a_number_per_example(run: Path) -> None:
    [folder] = (run / "cache").iterdir()
    reader = CacheReader(folder)
    signals = reader.read("first", np.arange(160))
    assert signals.logits.shape == (160, 1) and not signals.hidden
    record = read(run)["phases"][2]["fidelity"]["first"]
    assert record["rows"] == 32 and record["kl"] is None and record["lost"] < 1e-6
    assert "0.0% lost (32 rows)" in (run.parent / "one.txt").read_text()


def test_scores_are_those_of_scipy_on_what_predict_says(run: Path, data: Path) -> None:
    rows = rows_of(data, "test")
    pairs = [(row["text_a"], row["text_b"]) for row in rows]
    labels = [row["label"] for row in rows]
    found = list(predict(run, pairs))
    assert all(each.keys() == {"predicted"} for each in found)
    numbers = [each["predicted"] for each in found]
    results = read(run)
    evaluation = results["phases"][-1]
    own = evaluation["models"][results["student"]]
    assert own["examples"] == 80
    assert own["pearson"] == pytest.approx(stats.pearsonr(numbers, labels).statistic, abs=1e-5)
    assert own["spearman"] == pytest.approx(stats.spearmanr(numbers, labels).statistic, abs=1e-3)
    assert own["mse"] == pytest.approx(np.mean(np.square(np.subtract(numbers, labels))), rel=1e-4)
    assert own["pearson"] > 0.6 and evaluation["models"]["first"]["pearson"] > 0.7
    theirs = pipeline("text-classification", model=str(run / "student"))(
        [{"text": one, "text_pair": other} for one, other in pairs]
    )
    assert [each["score"] for each in theirs] == pytest.approx(numbers, abs=1e-5)


def test_the_baseline_is_the_mean_and_has_no_correlation(run: Path, data: Path) -> None:
    results = read(run)
    evaluation = results["phases"][-1]
    mean = np.mean([row["label"] for row in rows_of(data, "train")])
    baseline = evaluation["baseline"]
    assert baseline["answer"] == f"{mean:.4g}" and baseline["rule"] == "the mean label"
    assert baseline["pearson"] is None and baseline["spearman"] is None
    assert baseline["mse"] > evaluation["models"][results["student"]]["mse"]
    assert evaluation["models"]["first"]["to_baseline"] == {"difference": None, "interval": None}
    against = {row["other"]: row for row in evaluation["comparisons"] if row["student"] == "cached"}
    assert against["start"]["interval"][0] > 0, "better than before it was trained"
    assert "always predicting" not in results["verdict"], "it has no Pearson"


def test_what_is_said_of_the_student_is_of_numbers(run: Path) -> None:
    folder = run
    html, card = (
        (folder / "report.html").read_text(),
        (folder / "student" / "README.md").read_text(),
    )
    page, heading, _ = html.partition("<h2>The recipe</h2>")
    assert heading
    for text in (page, card, read(folder)["verdict"]):
        assert "Pearson" in text
        assert not any(word in text for word in ("masked", "ccuracy", "most frequent", "eliab"))
    assert "The baseline predicts the mean label of train" in html
    assert "What always predicts one number has no Pearson and no Spearman." in html
    assert "undefined" in html and "MSE ↓" in html
    assert "type: pearsonr" in card and "pipeline_tag: text-classification" in card
    config = AutoModelForSequenceClassification.from_pretrained(folder / "student").config
    assert config.problem_type == "regression" and config.num_labels == 1


@pytest.mark.usefixtures("in_this_process")
def test_profile_and_predict_by_command(run: Path, data: Path) -> None:
    folder, command = run, CliRunner()
    done = command.invoke(app, ["predict", str(folder), str(data / "test.jsonl")])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 80 and all(type(row["predicted"]) is float for row in rows)
    assert not any("probabilities" in row for row in rows)
    done = command.invoke(app, ["profile", str(folder)])
    assert done.exit_code == 0, done.output
    assert "pearson" in done.output.lower() and "first" in done.output
