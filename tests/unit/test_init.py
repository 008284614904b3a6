"""`ds-distill init` writes recipes that `check` passes, and says which option decides where it
cannot know."""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from passes import untraced
from toys import TOY_LABELS, make_tiny_bert, make_toy_classifier, toy_text, toy_vocabulary
from transformers import AutoConfig
from typer.testing import CliRunner, Result

from ds_distill.cli import app
from ds_distill.data.readers import open_file
from ds_distill.errors import UserError

SIZES = {"train": 60, "validation": 40, "test": 40}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classifiers of the toy task, one of them with its labels in another order, one whose
    outputs have no names, and an encoder."""
    here = tmp_path_factory.mktemp("models")
    for name in ("first", "second", "nameless"):
        make_toy_classifier(here / name)
    labels = {"second": TOY_LABELS[::-1], "nameless": [f"LABEL_{n}" for n in range(3)]}
    for name, given in labels.items():
        config = AutoConfig.from_pretrained(here / name)
        config.id2label = dict(enumerate(given))
        config.label2id = {label: number for number, label in enumerate(given)}
        config.save_pretrained(here / name)
    make_tiny_bert(here / "encoder", toy_vocabulary())
    return here


def ds_distill(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


Row = Callable[[int, random.Random], dict[str, Any]]


def write(folder: Path, row: Row, kind: str = "jsonl", splits: dict[str, int] = SIZES) -> Path:
    draw = random.Random(0)
    folder.mkdir(exist_ok=True)
    for split, size in splits.items():
        rows = [row(number, draw) for number in range(size)]
        with open(folder / f"{split}.{kind}", "w", newline="", encoding="utf-8") as file:
            if kind == "csv":
                lines = csv.DictWriter(file, list(rows[0]))
                lines.writeheader()
                lines.writerows(rows)
            else:
                file.writelines(json.dumps(one) + "\n" for one in rows)
    return folder


def text(number: int, draw: random.Random) -> str:
    return toy_text(TOY_LABELS[number % 3], draw)


def ticket(number: int, draw: random.Random) -> dict[str, Any]:
    return {
        "ticket": f"T{number}",
        "Body": text(number, draw),
        "queue": TOY_LABELS[number % 3],
        "minutes": number * 0.5,
    }


def question(number: int, draw: random.Random) -> dict[str, Any]:
    context = text(number, draw)
    word = context.split()[-1].strip(".")
    answer = {"text": word, "start": context.rindex(word)}
    return {"question": "what is it?", "context": context, "answers": [answer]}


def tagged(number: int, draw: random.Random) -> dict[str, Any]:
    words = text(number, draw).split()
    return {"tokens": words, "tags": ["B-Thing", *["O"] * (len(words) - 1)]}


def spans(number: int, draw: random.Random) -> dict[str, Any]:
    whole = text(number, draw)
    end = len(whole.split()[0])
    return {
        "text": whole,
        "spans": [{"start": 0, "end": end, "type": "Thing"}] if number % 2 else [],
    }


KINDS: dict[str, tuple[Row, str, list[str]]] = {
    "single-label": (ticket, "csv", []),
    "multi-label": (
        lambda n, d: {"text": text(n, d), "labels": TOY_LABELS[: n % 4] if n % 3 else []},
        "jsonl",
        [],
    ),
    "regression": (
        lambda n, d: {"sentence1": text(n, d), "sentence2": text(n, d), "score": n / 7},
        "csv",
        [],
    ),
    "token-classification": (tagged, "jsonl", []),
    "token-classification of spans": (spans, "jsonl", []),
    "character-spans": (question, "jsonl", ["--task", "character-spans"]),
    "extractive-qa": (question, "jsonl", []),
    "single-label beside tags": (
        lambda n, d: {**tagged(n, d), **ticket(n, d)},
        "jsonl",
        ["--label", "queue", "--text", "Body"],
    ),
    "masked-lm": (lambda n, d: {"text": text(n, d)}, "jsonl", ["--task", "masked-lm"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_guessed_and_check_passes(kind: str, models: Path, tmp_path: Path) -> None:
    row, form, options = KINDS[kind]
    data = write(tmp_path / "data", row, form)
    file = tmp_path / "made.yaml"
    made = ds_distill("init", data, "--teacher", models / "encoder", "--output", file, *options)
    assert made.exit_code == 0 and str(file) in made.output
    recipe = yaml.safe_load(file.read_text())
    assert recipe["task"]["type"] == kind.split()[0]
    assert recipe["phases"][0] == {"fine-tune": {"models": ["teacher"]}}
    checked = ds_distill("check", file)
    assert checked.exit_code == 0 and "no mistakes found" in checked.output, checked.output
    if kind == "single-label":
        assert recipe["task"]["data"]["columns"] == {"text": "Body", "label": "queue"}
        assert recipe["task"]["labels"] == sorted(TOY_LABELS)
    if kind == "regression":
        columns = {"text": "sentence1", "text_b": "sentence2", "label": "score"}
        assert recipe["task"]["data"]["columns"] == columns


@pytest.mark.parametrize("kind", ["single-label", "masked-lm"])
def test_a_file_without_labels_judges_nothing(kind: str, models: Path, tmp_path: Path) -> None:
    """As of a competition. It was evaluated on, and `check` named a column that was not there."""
    row, form, options = KINDS[kind]
    data = write(tmp_path / "data", row, form, {"train": 60})
    for split in ("valid", "test"):
        (data / f"{split}.csv").write_text("Body,queue\none,\ntwo,\n")
    if kind == "masked-lm":  # nothing but train
        for split in ("valid", "test"):
            (data / f"{split}.csv").unlink()
    file = tmp_path / "made.yaml"
    teacher = ["--teacher", models / "encoder"]
    made = ds_distill("init", data, *teacher, "--output", file, *options)
    recipe = yaml.safe_load(file.read_text())
    assert recipe["task"]["data"]["folds"] == {"number": 10, "fold": 1}
    if kind == "single-label":
        assert recipe["task"]["data"]["splits"] == {"train": "train.csv"}
        assert "test.csv has no labels, and is left out." in made.output
    checked = ds_distill("check", file)
    assert checked.exit_code == 0, checked.output


def test_capitals_of_a_teachers_labels_do_not_count(models: Path, tmp_path: Path) -> None:
    """As `check` has it: a teacher of Cat and DOG for data of cat and dog."""
    teacher = shutil.copytree(models / "second", tmp_path / "teacher")
    config = AutoConfig.from_pretrained(teacher)
    config.id2label = {number: name.upper() for number, name in config.id2label.items()}
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.save_pretrained(teacher)
    data, file = write(tmp_path / "data", ticket, "csv"), tmp_path / "made.yaml"
    assert ds_distill("init", data, "--teacher", teacher, "--output", file).exit_code == 0
    recipe = yaml.safe_load(file.read_text())
    assert recipe["task"]["labels"] == TOY_LABELS[::-1]
    assert recipe["teachers"]["teacher"] == {"model": str(teacher)}
    assert ds_distill("check", file).exit_code == 0


def test_numbers_beside_names_of_train_are_no_class_ids(models: Path, tmp_path: Path) -> None:
    """Of the recipe's labels, in the order of their names, 1 would be `2 stars`."""
    data, file = tmp_path / "data", tmp_path / "made.yaml"
    write(data, lambda n, draw: {"text": text(n, draw), "label": f"{n % 3 + 1} stars"})
    teacher = ["--teacher", models / "encoder", "--output", file]
    assert ds_distill("init", data, *teacher).exit_code == 0
    write(data, lambda n, draw: {"text": text(n, draw), "label": n % 3 + 1}, "jsonl", {"test": 40})
    with pytest.raises(UserError, match=r"test\.jsonl:1: .*names in train"):
        ds_distill("init", data, *teacher, "--force")


def test_it_starts_without_torch(models: Path, tmp_path: Path) -> None:
    """In a process of its own: here torch is imported already."""
    data, file = write(tmp_path / "data", ticket, "csv"), tmp_path / "made.yaml"
    program = (
        "import sys; from ds_distill.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    words = ["init", data, "--teacher", models / "encoder", "--output", file]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0 and file.is_file(), done.stderr


def test_trained_teachers_give_the_order_of_labels_and_are_routed(
    models: Path, tmp_path: Path
) -> None:
    data, file = write(tmp_path / "data", ticket, "csv"), tmp_path / "made.yaml"
    teachers = [f"--teacher={models / name}" for name in ("second", "nameless")]
    assert ds_distill("init", data, *teachers, "--output", file).exit_code == 0
    recipe = yaml.safe_load(file.read_text())
    assert recipe["task"]["labels"] == TOY_LABELS[::-1], "the order of `second`"
    assert recipe["teachers"]["teacher-2"]["labels"] == {
        f"LABEL_{number}": label for number, label in enumerate(TOY_LABELS[::-1])
    }
    kinds = [next(iter(phase)) for phase in recipe["phases"]]
    assert kinds == ["fine-tune", "cache", "expertise", "distil", "evaluate"]
    assert ds_distill("check", file).exit_code == 0


def test_the_recipe_trains(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file: a tenth of it is the test split, and nothing chooses an epoch."""
    data, file = write(tmp_path / "data", ticket, "csv", {"all": 100}), tmp_path / "made.yaml"
    single = data / "all.csv"
    arguments = ["--teacher", models / "first", "--output", file]
    assert ds_distill("init", single, *arguments).exit_code == 0
    with pytest.raises(UserError, match=r"--force"):
        ds_distill("init", single, *arguments)
    settings = ["training.batch_size=8", "training.epochs=1", "deepspeed=zero0_fp32"]
    done = ds_distill("run", file, *settings, "--folder", tmp_path / "run")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert set(results["phases"][-1]["models"]) == {"teacher", "student", "labels-only"}
    trained = [one for phase in results["phases"] for one in phase.get("trained", [])]
    assert all(one["steps"] >= 10 for one in trained), trained


def test_what_cannot_be_known_is_asked(models: Path, tmp_path: Path) -> None:
    teacher = ["--teacher", models / "first", "--output", tmp_path / "made.yaml"]

    def refused(row: Row, message: str, *options: str, kind: str = "jsonl") -> None:
        data = write(tmp_path / "data", row, kind)
        with pytest.raises(UserError, match=message):
            ds_distill("init", data, *teacher, *options)
        for file in data.iterdir():
            file.unlink()
        assert not (tmp_path / "made.yaml").exists()

    def two_texts(number: int, draw: random.Random) -> dict[str, Any]:
        return {
            "one": text(number, draw),
            "two": text(number, draw),
            "label": TOY_LABELS[number % 3],
        }

    refused(two_texts, r"one, two\. Say which: --text")
    refused(lambda n, d: {"text": text(n, d)}, "no column looks like labels.*--label")
    refused(
        lambda n, d: {"text": text(n, d), "rating": n % 5, "topic": TOY_LABELS[n % 3]},
        "rating, topic. Say which: --label",
    )
    refused(lambda n, d: {"text": text(n, d), "label": "one"}, "1 different label")
    refused(
        lambda n, d: {"text": text(n, d), "label": "weather" if n % 2 else "plant"},
        "not in both are animal, food, plant",
    )
    refused(
        ticket, "no columns of the task extractive-qa .*ticket, Body", "--task", "extractive-qa"
    )
    refused(two_texts, "--task sentences: choose one of", "--task", "sentences")
    refused(two_texts, "--text three: .* has one, two, label", "--text", "three")
    with pytest.raises(UserError, match="no such file"):
        ds_distill("init", tmp_path / "nothing", *teacher)
    (tmp_path / "odd.pdf").write_text("x")
    with pytest.raises(UserError, match="not a kind of data file"):
        ds_distill("init", tmp_path / "odd.pdf", *teacher)
    assert not (tmp_path / "made.yaml").exists()


@pytest.mark.parametrize("splits", [SIZES, {"train": 60, "test": 40}])
def test_teachers_that_know_a_part_of_the_labels_say_which(
    splits: dict[str, int], models: Path, tmp_path: Path
) -> None:
    """They were refused, though a recipe can have them; without validation, nothing is routed."""
    both = [TOY_LABELS[:2], [*TOY_LABELS[1:], "sports"]]
    for name, own in zip(("some", "others"), both, strict=True):
        shutil.copytree(models / "first", tmp_path / name)
        config = AutoConfig.from_pretrained(tmp_path / name)
        config.id2label = dict(enumerate(own))
        config.label2id = {label: number for number, label in enumerate(own)}
        config.save_pretrained(tmp_path / name)
    data, file = write(tmp_path / "data", ticket, "csv", splits), tmp_path / "made.yaml"
    teachers = [f"--teacher={tmp_path / name}" for name in ("some", "others")]
    with pytest.raises(UserError, match="no teacher knows weather"):
        ds_distill("init", data, teachers[0], "--output", file)
    assert ds_distill("init", data, *teachers, "--output", file).exit_code == 0
    recipe = yaml.safe_load(file.read_text())
    assert recipe["task"]["labels"] == sorted(TOY_LABELS)
    assert [teacher["labels"] for teacher in recipe["teachers"].values()] == [
        {"animal": "animal", "food": "food"},
        {"food": "food", "weather": "weather", "sports": None},
    ]
    distil = next(phase["distil"] for phase in recipe["phases"] if "distil" in phase)
    if splits is SIZES:
        assert distil["routing"] == "chosen"
    else:
        assert distil["routing"] == {"policy": "average", "mix": "losses"}
        assert "cross_entropy" in distil["losses"]
    checked = ds_distill("check", file)
    assert "no mistakes found" in checked.output and "leaves open" not in checked.output


@pytest.mark.parametrize(("ending", "between"), [("tsv", "\t"), ("conll", "\t"), ("conll", " ")])
def test_lines_of_conll_are_sentences(
    ending: str, between: str, models: Path, tmp_path: Path
) -> None:
    """A file of them was taken for a table of words with labels."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, size in SIZES.items():
        sentences = [
            "Anna\tNN\tB-PER\nsleeps\tVB\tO\n",
            "-DOCSTART-\t-X-\tO\n\nin\tIN\tO\nNew\tNN\tB-LOC\nYork\tNN\tI-LOC\n",
        ] * size
        content = "\n".join(sentences).replace("\t", between)
        (folder / f"{split}.{ending}").write_text(content)
    file = tmp_path / "made.yaml"
    made = ds_distill("init", folder, "--teacher", models / "encoder", "--output", file)
    assert "It is read as a word and its tag on each line, as CoNLL has them." in made.output
    assert yaml.safe_load(file.read_text())["task"]["type"] == "token-classification"
    assert "no mistakes found" in ds_distill("check", file).output
    test = folder / f"test.{ending}"
    rows = [row for _, row in open_file(test).rows([])]
    assert rows[:2] == [
        {"tokens": ["Anna", "sleeps"], "tags": ["B-PER", "O"]},
        {"tokens": ["in", "New", "York"], "tags": ["O", "B-LOC", "I-LOC"]},
    ]
    if ending == "tsv":
        return  # it may be a table
    test.write_text(content + "\n\nalone\n")
    with pytest.raises(UserError, match=r"not a word, a (tab|space) and a tag"):
        list(open_file(test).rows([]))


def test_semicolons_separate_where_the_header_has_no_comma(models: Path, tmp_path: Path) -> None:
    lines = [f"{TOY_LABELS[n % 3]};{text(n, random.Random(n))}, or so" for n in range(60)]
    data, file = tmp_path / "all.csv", tmp_path / "made.yaml"
    data.write_text("\n".join(["queue;Body", *lines]))
    made = ds_distill("init", data, "--teacher", models / "encoder", "--output", file)
    assert "It is read as values between semicolons." in made.output
    columns = yaml.safe_load(file.read_text())["task"]["data"]["columns"]
    assert columns == {"text": "Body", "label": "queue"}
    assert "no mistakes found" in ds_distill("check", file).output
    data.write_text("text;or so,label\na,b\n")
    assert open_file(data).columns() == ["text;or so", "label"]


@pytest.mark.parametrize("indent", [None, 2])
def test_squads_nested_form_is_refused_with_the_way_out(
    indent: int | None, models: Path, tmp_path: Path
) -> None:
    question = {"question": "who?", "id": "1", "answers": [{"text": "b", "answer_start": 2}]}
    paragraphs = [{"context": "a b", "qas": [question]}]
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}, indent=indent))
    with pytest.raises(UserError, match=r"SQuAD's nested form .* question, context and answers"):
        ds_distill("init", file, "--teacher", models / "encoder")


def test_a_large_teacher_that_nobody_named_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "data", ticket, "csv")
    monkeypatch.chdir(tmp_path)
    assert "Without a GPU that takes days: name a small one" in ds_distill("init", data).output


@pytest.mark.parametrize(
    ("machine", "batch", "wanted"),
    [
        (["--gpu", "t4"], 32, {"deepspeed": "zero1_fp16"}),
    ],
)
def test_the_plan_for_a_gpu_gives_stage_and_micro_batch(
    machine: list[str], batch: int | None, wanted: dict[str, Any], tmp_path: Path
) -> None:
    """Without a teacher it is RoBERTa-large, whose configuration comes with the package."""
    long = {"text": "word " * 400, "label": "a"}
    data = write(tmp_path / "data", lambda n, d: {**long, "label": "ab"[n % 2]})
    file = tmp_path / "made.yaml"
    made = ds_distill("init", data, "--output", file, *machine)
    assert made.exit_code == 0, made.output
    recipe = yaml.safe_load(file.read_text())
    assert {key: recipe[key] for key in wanted} == wanted
    micro = recipe.get("training", {}).get("micro_batch_size")
    assert micro is None if batch is None else 0 < micro < batch and batch % micro == 0
    with pytest.raises(UserError, match="--gpu h1000: not a GPU that is known here"):
        ds_distill("init", data, "--output", file, "--force", "--gpu", "h1000")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_planned_for_a_gpu(
    kind: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of questions it ended in an AssertionError."""
    untraced(monkeypatch)
    row, form, options = KINDS[kind]
    data, file = write(tmp_path / "data", row, form), tmp_path / "made.yaml"
    given = ["--teacher", models / "encoder", "--output", file, "--gpu", "h100", *options]
    assert ds_distill("init", data, *given).exit_code == 0
    assert yaml.safe_load(file.read_text())["deepspeed"] == "zero1_auto"


def test_numbers_are_classes_or_numbers(models: Path, tmp_path: Path) -> None:
    for most, options, task in (
        (5, [], "single-label"),
        (50, [], "regression"),
        (5, ["--task", "regression"], "regression"),
    ):
        file = tmp_path / "made.yaml"
        data = write(
            tmp_path / "data",
            lambda n, d, most=most: {"text": text(n, d), "label": n % most},  # type: ignore[misc]
            "csv",
        )
        arguments = ["init", data, "--teacher", models / "encoder", "--output", file, "--force"]
        assert ds_distill(*arguments, *options).exit_code == 0
        assert yaml.safe_load(file.read_text())["task"]["type"] == task


def parquet(folder: Path, row: Row, named: dict[str, Any]) -> Path:
    """Rows as parquet, in which some columns declare the names of their class ids."""
    folder.mkdir()
    for split, size in SIZES.items():
        draw = random.Random(0)
        data = datasets.Dataset.from_list([row(number, draw) for number in range(size)])
        for name, feature in named.items():
            data = data.cast_column(name, feature)
        data.to_parquet(folder / f"{split}.parquet")
    return folder


INTENTS = datasets.ClassLabel(names=[f"intent-{number}" for number in range(40)])
PLACES = datasets.ClassLabel(names=["O", "B-place", "I-place", "B-river", "I-river"])
WORDS = datasets.ClassLabel(names=["noun", "verb"])


def sentence(number: int, draw: random.Random) -> dict[str, Any]:
    """As conll2003 has them, with two columns of tags."""
    words = text(number, draw).split()
    return {"tokens": words, "pos": [n % 2 for n in range(len(words))], "ner": [3] * len(words)}


DECLARED: dict[str, tuple[Row, dict[str, Any], list[str], dict[str, Any]]] = {
    "more than 20 classes": (
        lambda n, d: {"text": text(n, d), "label": n % 30},
        {"label": INTENTS},
        [],
        {"type": "single-label", "labels": INTENTS.names},
    ),
    "of an unusual name": (
        lambda n, d: {"text": text(n, d), "what_for": n % 30},
        {"what_for": INTENTS},
        [],
        {"type": "single-label", "labels": INTENTS.names},
    ),
    "lists beside a text": (
        lambda n, d: {"text": text(n, d), "labels": [n % 4, 4] if n % 3 else []},
        {"labels": datasets.List(PLACES)},
        [],
        {"type": "multi-label", "labels": PLACES.names},
    ),
    "tags of a name": (
        sentence,
        {"pos": datasets.List(WORDS), "ner": datasets.List(PLACES)},
        ["--label", "ner"],
        {"type": "token-classification", "labels": PLACES.names},
    ),
    "tags that are no entities": (
        sentence,
        {"pos": datasets.LargeList(WORDS)},
        [],
        {"type": "token-classification", "labels": WORDS.names, "metric": "accuracy"},
    ),
}


@pytest.mark.parametrize("case", DECLARED)
def test_class_ids_with_names_are_classes(case: str, models: Path, tmp_path: Path) -> None:
    row, named, options, wanted = DECLARED[case]
    data, file = parquet(tmp_path / "data", row, named), tmp_path / "made.yaml"
    made = ds_distill("init", data, "--teacher", models / "encoder", "--output", file, *options)
    assert made.exit_code == 0, made.output
    task = yaml.safe_load(file.read_text())["task"]
    assert {key: task.get(key) for key in wanted} == wanted
    if "tags" in case:
        assert task["data"]["columns"] == {"tags": options[-1] if options else "pos"}
    checked = ds_distill("check", file)
    assert checked.exit_code == 0 and "no mistakes found" in checked.output, checked.output


def test_of_several_columns_of_tags_one_is_asked_for(models: Path, tmp_path: Path) -> None:
    named = {"pos": datasets.List(WORDS), "ner": datasets.List(PLACES)}
    data = parquet(tmp_path / "data", sentence, named)
    arguments = ["--teacher", models / "encoder", "--output", tmp_path / "made.yaml"]
    with pytest.raises(UserError, match=r"tags\?.*pos, ner\. Say which: --label"):
        ds_distill("init", data, *arguments)
