"""The programs of docs/library.md as they stand, on a cache that a command built."""

import ast
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from processes import ended
from runs import command_line, written
from toys import TOY_LABELS, make_tiny_bert, make_toy_classifier, toy_vocabulary, write_toy_task
from transformers import AutoModelForSequenceClassification

import ds_distill as package
from ds_distill.check.check import check_all
from ds_distill.recipe import load_recipe

ROOT = Path(__file__).parents[2]


def test_the_readmes_lines_for_own_data_hold(tmp_path, monkeypatch):
    """As a shell reads them; what they run last is checked here, and run by tests/e2e."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    line = re.search(r"^ds-distill (init DATA .*) && ds-distill run my\.yaml$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    write_toy_task(tmp_path / "DATA", {"train": 80, "validation": 60, "test": 30})
    teachers = {"A", "B"} & {*shlex.split(line[1])}
    for name in teachers:
        make_toy_classifier(tmp_path / name)
    command_line(*shlex.split(line[1]))
    recipe = load_recipe("my.yaml")
    check_all(recipe)
    assert len(recipe.teachers) == len(teachers) == 2
    assert sorted(recipe.task.labels) == sorted(TOY_LABELS)


@pytest.fixture(scope="module")
def place(tmp_path_factory, ds_distill):
    """A folder in which what the examples name is there: data, models, a recipe and its cache."""
    folder = write_toy_task(tmp_path_factory.mktemp("examples"), {"train": 80, "test": 30})
    teacher = make_toy_classifier(folder / "models" / "bert")
    for name in ("models/roberta", "models/small"):
        shutil.copytree(teacher, folder / name)
    make_tiny_bert(folder / "google" / "bert_uncased_L-4_H-256_A-4", toy_vocabulary())
    recipe = {
        "task": {"data": {"path": str(folder)}, "max_length": 32},
        "teachers": {"bert": {"model": str(teacher)}},
        "student": {"model": str(teacher), "layers": [0]},
        "phases": [
            {"cache": {"splits": "train"}},
            {"distil": {"teachers": "cached", "losses": {"kl": {}}, "keep": "last"}},
            {"evaluate": {"split": "test"}},
        ],
    }
    (folder / "DATA").symlink_to(folder)
    written(recipe, folder, "my")
    ds_distill("cache", "build", "my.yaml", cwd=folder)
    return folder


PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def run(place, monkeypatch):
    """Run the page's block of a number; the names that it leaves."""
    monkeypatch.chdir(place)

    def run(number):
        names = {}
        exec(compile(BLOCKS[number], "example", "exec"), names)
        return names

    return run


def test_an_example_trains_on_the_teachers_logits(run, place, capsys):
    names = run(0)
    assert capsys.readouterr().out.startswith("epoch 0: loss of the last batch ")
    assert sum(1 for line in BLOCKS[0].splitlines() if line.strip()) <= 25
    assert torch.isfinite(names["loss"]) and names["student"].num_labels == len(TOY_LABELS)
    bert = AutoModelForSequenceClassification.from_pretrained(place / "models" / "bert")
    inputs = names["tokenizer"](names["chosen"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = bert.eval()(**inputs).logits
    torch.testing.assert_close(names["teacher"].logits, expected, atol=2e-3, rtol=2e-3)


def test_the_page_on_teachers_in_memory(run):
    names = run(1)
    assert set(names["parts"]) == {"loss", "kl", "cross_entropy"}
    assert names["signals"]["student"].logits.shape == (2, 3)


def test_the_page_on_recipes(run, place):
    assert (place / run(2)["done"].student / "model.safetensors").is_file()
    assert set(run(3)["found"]["probabilities"]) == set(TOY_LABELS)


def test_the_page_names_what_the_package_names():
    table = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    named = {name.partition(".")[0] for name in re.findall(r"`([A-Za-z_.]+)`", table)}
    assert set(package.__all__) - {"__version__"} <= named
    tree = ast.parse("".join(BLOCKS))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "ds_distill"
        for alias in node.names
    }
    assert imported <= set(package.__all__)


def test_the_script_learns_from_the_cache_alone(place, command_environment):
    """The labels are taken away; the student comes nearer to the teacher all the same."""
    lines = (place / "train.jsonl").read_text().splitlines()
    texts = [{"text": json.loads(line)["text"]} for line in lines]
    (place / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    [cache] = (place / "runs" / "my" / "cache").iterdir()
    given = ["google/bert_uncased_L-4_H-256_A-4", "texts.jsonl", "test.jsonl", "out/student"]
    given += ["--epochs", "6", "--learning-rate", "1e-2", "--batch-size", "16"]
    command = [sys.executable, ROOT / "docs" / "library.py", cache, *given]
    done = ended(*command, cwd=place, env=command_environment)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0]
    assert "accuracy 0." in done.stdout
    student = AutoModelForSequenceClassification.from_pretrained(place / "out" / "student")
    assert list(student.config.id2label.values()) == TOY_LABELS
