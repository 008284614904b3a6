"""`ds-distill init` writes recipes that `check` passes, and says which option decides where it
cannot know."""

import json
import random
import shutil
from pathlib import Path

import datasets
import kinds
import pandas
import pytest
import yaml
from processes import python
from runs import command_line as ds_distill
from runs import results
from toys import TOY_LABELS, make_tiny_bert, make_toy_classifier, toy_text, toy_vocabulary
from transformers import AutoConfig

from ds_distill.data.readers import open_file
from ds_distill.errors import UserError
from ds_distill.init.recipe import read_teachers

SIZES = {"train": 60, "validation": 40, "test": 40}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Classifiers of the toy task: with its labels, in another order, in capitals, without names,
    with a part of them; and an encoder."""
    here = tmp_path_factory.mktemp("models")
    make_toy_classifier(here / "first")
    others = {
        "second": TOY_LABELS[::-1],
        "CAPITALS": [label.upper() for label in TOY_LABELS[::-1]],
        "nameless": [f"LABEL_{n}" for n in range(3)],
        "some": TOY_LABELS[:2],
        "others": [*TOY_LABELS[1:], "sports"],
    }
    for name, labels in others.items():
        shutil.copytree(here / "first", here / name)
        numbers = {label: number for number, label in enumerate(labels)}
        names = {"id2label": dict(enumerate(labels)), "label2id": numbers}
        AutoConfig.from_pretrained(here / "first", **names).save_pretrained(here / name)
    make_tiny_bert(here / "encoder", toy_vocabulary())
    return here


@pytest.fixture
def init(models, tmp_path):
    """Make a recipe, which `check` must pass; returns it and what was said."""

    def init(data, *options, teachers="encoder"):
        file = tmp_path / "made.yaml"
        named = [f"--teacher={models / name}" for name in teachers.split()]
        made = ds_distill("init", data, *named, "--output", file, "--force", *options)
        checked = ds_distill("check", file)
        assert "no mistakes found" in checked.output, checked.output
        assert "leaves open" not in checked.output
        return yaml.safe_load(file.read_text()), made.output

    return init


def write(folder, row, kind="jsonl", splits=SIZES, named=None):
    """named: columns of a parquet that declare the names of their class ids."""
    draw = random.Random(0)
    for split, size in splits.items():
        rows = [row(number, draw) for number in range(size)]
        file = kinds.write(folder / f"{split}.{kind}", rows)
        if named is not None:
            data = datasets.Dataset.from_list(rows)
            for name, feature in named.items():
                data = data.cast_column(name, feature)
            data.to_parquet(file)
    return folder


def text(number, draw):
    return toy_text(TOY_LABELS[number % 3], draw)


def labelled(of, name="label"):
    return lambda n, draw: {"text": text(n, draw), name: of(n)}


def ticket(number, draw):
    row = {"ticket": f"T{number}", "Body": text(number, draw), "queue": TOY_LABELS[number % 3]}
    return row | {"minutes": number * 0.5}


def question(number, draw):
    context = text(number, draw)
    word = context.split()[-1].strip(".")
    answer = {"text": word, "start": context.rindex(word)}
    return {"question": "what is it?", "context": context, "answers": [answer]}


def tagged(number, draw):
    words = text(number, draw).split()
    return {"tokens": words, "tags": ["B-Thing", *["O"] * (len(words) - 1)]}


def spans(number, draw):
    whole = text(number, draw)
    one = {"start": 0, "end": len(whole.split()[0]), "type": "Thing"}
    return {"text": whole, "spans": [one] if number % 2 else []}


def two_texts(number, draw):
    return {"one": text(number, draw), "two": text(number, draw), "label": TOY_LABELS[number % 3]}


def pair(number, draw):
    return {"sentence1": text(number, draw), "sentence2": text(number, draw), "score": number / 7}


def both(number, draw):
    return {**tagged(number, draw), **ticket(number, draw)}


KINDS = {
    "single-label": (ticket, "csv", ""),
    "multi-label": (
        labelled(lambda n: TOY_LABELS[: n % 4] if n % 3 else [], "labels"),
        "jsonl",
        "",
    ),
    "regression": (pair, "csv", ""),
    "token-classification": (tagged, "jsonl", ""),
    "token-classification of spans": (spans, "jsonl", ""),
    "character-spans": (question, "jsonl", "--task character-spans"),
    "extractive-qa": (question, "jsonl", ""),
    "single-label beside tags": (both, "jsonl", "--label queue --text Body"),
    "masked-lm": (lambda n, d: {"text": text(n, d)}, "jsonl", "--task masked-lm"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_guessed(kind, init, tmp_path):
    row, form, options = KINDS[kind]
    recipe, said = init(write(tmp_path / "data", row, form), *options.split())
    assert recipe["task"]["type"] == kind.split()[0] and "made.yaml" in said
    assert recipe["phases"][0] == {"fine-tune": {"models": ["teacher"]}}
    if kind == "single-label":
        assert recipe["task"]["data"]["columns"] == {"text": "Body", "label": "queue"}
        assert recipe["task"]["labels"] == sorted(TOY_LABELS)
    if kind == "regression":
        columns = {"text": "sentence1", "text_b": "sentence2", "label": "score"}
        assert recipe["task"]["data"]["columns"] == columns


def test_a_file_without_labels_judges_nothing(init, tmp_path):
    """As of a competition. It was evaluated on, and `check` named a column that was not there."""
    data = write(tmp_path / "data", ticket, "csv", {"train": 60})
    for split in ("valid", "test"):
        (data / f"{split}.csv").write_text("Body,queue\none,\ntwo,\n")
    recipe, said = init(data)
    assert recipe["task"]["data"]["folds"] == {"number": 10, "fold": 1}
    assert recipe["task"]["data"]["splits"] == {"train": "train.csv"}
    assert "test.csv has no labels, and is left out." in said
    texts = write(tmp_path / "texts", *KINDS["masked-lm"][:2], {"train": 60})
    recipe, _ = init(texts, "--task", "masked-lm")
    assert recipe["task"]["data"]["folds"] == {"number": 10, "fold": 1}


def test_train_may_have_texts_alone_where_teachers_know_the_labels(init, tmp_path):
    """The split validation says which column they would be in, and chooses."""
    data = write(tmp_path / "data", ticket, "csv")
    texts = pandas.read_csv(data / "train.csv")
    for train in (texts.drop(columns="queue"), texts.assign(queue="")):
        train.to_csv(data / "train.csv", index=False)
        recipe, said = init(data, teachers="second first")
        assert "It has no labels: " in said and recipe["task"]["labels"] == TOY_LABELS[::-1]
        assert recipe["task"]["data"]["columns"] == {"text": "Body", "label": "queue"}
        kinds = [next(iter(phase)) for phase in recipe["phases"]]
        assert kinds == ["cache", "expertise", "distil", "evaluate"]
    (data / "test.csv").unlink()
    assert init(data, teachers="first")[0]["phases"][-1] == {"evaluate": {"split": "validation"}}
    for file in data.iterdir():  # nor is another column of few values taken for it
        texts = pandas.read_csv(file).rename(columns={"queue": "label"})
        texts.assign(desk=["ab"[n % 2] for n in texts.index]).to_csv(file, index=False)
    recipe, said = init(data, teachers="first")
    assert "It has no labels: " in said and recipe["task"]["labels"] == TOY_LABELS
    for teacher in ("encoder", "nameless"):
        with pytest.raises(UserError, match="names its own"):
            init(data, teachers=teacher)


def test_numbers_beside_names_of_train_are_no_class_ids(init, tmp_path):
    """Of the recipe's labels, in the order of their names, 1 would be `2 stars`."""
    data = write(tmp_path / "data", labelled(lambda n: f"{n % 3 + 1} stars"))
    init(data)
    write(data, labelled(lambda n: n % 3 + 1), "jsonl", {"test": 40})
    with pytest.raises(UserError, match=r"test\.jsonl:1: .*names in train"):
        init(data)


def test_it_starts_without_torch(models, tmp_path):
    """In a process of its own: here torch is imported already."""
    data, file = write(tmp_path / "data", ticket, "csv"), tmp_path / "made.yaml"
    program = (
        "import sys; from ds_distill.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    python(program, "init", data, "--teacher", models / "encoder", "--output", file)
    assert file.is_file()


def test_trained_teachers_give_the_order_of_labels_and_are_routed(init, tmp_path):
    data = write(tmp_path / "data", ticket, "csv")
    recipe, _ = init(data, teachers="second nameless")
    assert recipe["task"]["labels"] == TOY_LABELS[::-1], "the order of `second`"
    numbered = {f"LABEL_{number}": label for number, label in enumerate(TOY_LABELS[::-1])}
    assert recipe["teachers"]["teacher-2"]["labels"] == numbered
    kinds = [next(iter(phase)) for phase in recipe["phases"]]
    assert kinds == ["fine-tune", "cache", "expertise", "distil", "evaluate"]
    # Capitals do not count, as `check` has it.
    recipe, _ = init(data, teachers="CAPITALS")
    assert recipe["task"]["labels"] == TOY_LABELS[::-1]
    assert [*recipe["teachers"]["teacher"]] == ["model"]


def test_the_recipe_trains(models, tmp_path):
    """One file: a tenth of it is the test split, and nothing chooses an epoch."""
    data, file = write(tmp_path / "data", ticket, "csv", {"all": 100}), tmp_path / "made.yaml"
    arguments = ["init", data / "all.csv", "--teacher", models / "first", "--output", file]
    ds_distill(*arguments)
    with pytest.raises(UserError, match=r"--force"):
        ds_distill(*arguments)
    settings = ["training.batch_size=8", "training.epochs=1", "deepspeed=zero0_fp32"]
    ds_distill("run", file, *settings, "--folder", tmp_path / "run")
    phases = results(tmp_path / "run")["phases"]
    assert set(phases[-1]["models"]) == {"teacher", "student", "labels-only"}
    trained = [one for phase in phases for one in phase.get("trained", [])]
    assert all(one["steps"] >= 10 for one in trained), trained


def rated(number, draw):
    return {"text": text(number, draw), "rating": number % 5, "topic": TOY_LABELS[number % 3]}


ASKED = [
    (two_texts, "", r"one, two\. Say which: --text"),
    (lambda n, d: {"text": text(n, d)}, "", "no column looks like labels.*--label"),
    (rated, "", "rating, topic. Say which: --label"),
    (labelled(lambda n: "one"), "", "1 different label"),
    (ticket, "--task extractive-qa", "no columns of the task extractive-qa .*ticket, Body"),
    (two_texts, "--task sentences", "--task sentences: choose one of"),
    (two_texts, "--text three", "--text three: .* columns one, two, label"),
]


def test_what_cannot_be_known_is_asked(models, tmp_path):
    teacher = ["--teacher", models / "first", "--output", tmp_path / "made.yaml"]
    (tmp_path / "odd.pdf").write_text("x")
    rows = [(tmp_path / "nothing", "", "no such file")]
    rows += [(tmp_path / "od.pdf", "", "no such file or folder. Did you mean `odd.pdf`")]
    rows += [(tmp_path / "odd.pdf", "", "not a kind of data file")]
    for split, other in [("train", "validation"), ("test", "train")]:
        data = write(tmp_path / f"named otherwise in {split}", labelled(lambda n: "ab"[n % 2]))
        own = data / f"{split}.jsonl"
        own.write_text(own.read_text().replace('"label"', '"lable"'))
        rows.append((data, "", f"{split}.*no column 'label', which .*{other}.* mean `lable`"))
    for number, (row, options, message) in enumerate(ASKED):
        rows.append((write(tmp_path / str(number), row), options, message))
    for place, options, message in rows:
        with pytest.raises(UserError, match=message):
            ds_distill("init", place, *teacher, *options.split())
        assert not (tmp_path / "made.yaml").exists()


def test_teachers_that_know_a_part_of_the_labels_say_which(init, tmp_path):
    """They were refused, though a recipe can have them; without validation, nothing is routed."""
    data = write(tmp_path / "data", ticket, "csv")
    with pytest.raises(UserError, match="no teacher knows weather"):
        init(data, teachers="some")
    for routed in (True, False):
        recipe, _ = init(data, teachers="some others")
        assert recipe["task"]["labels"] == sorted(TOY_LABELS)
        assert [teacher["labels"] for teacher in recipe["teachers"].values()] == [
            {"animal": "animal", "food": "food"},
            {"food": "food", "weather": "weather", "sports": None},
        ]
        distil = next(phase["distil"] for phase in recipe["phases"] if "distil" in phase)
        by_loss = {"policy": "average", "mix": "losses"}
        assert distil["routing"] == ("chosen" if routed else by_loss)
        assert routed or "cross_entropy" in distil["losses"]
        (data / "validation.csv").unlink(missing_ok=True)


@pytest.mark.parametrize(("ending", "between"), [("tsv", "\t"), ("conll", "\t"), ("conll", " ")])
def test_lines_of_conll_are_sentences(ending, between, init, tmp_path):
    """A file of them was taken for a table of words with labels."""
    (tmp_path / "data").mkdir()
    sentences = [
        "Anna\tNN\tB-PER\nsleeps\tVB\tO\n",
        "-DOCSTART-\t-X-\tO\n\nin\tIN\tO\nNew\tNN\tB-LOC\nYork\tNN\tI-LOC\n",
    ]
    for split, size in SIZES.items():
        content = "\n".join(sentences * size).replace("\t", between)
        (tmp_path / "data" / f"{split}.{ending}").write_text(content)
    recipe, said = init(tmp_path / "data")
    assert "a word and its tag on each line, as CoNLL has them" in said
    assert recipe["task"]["type"] == "token-classification"
    test = tmp_path / "data" / f"test.{ending}"
    rows = [row for _, row in open_file(test).rows([])]
    assert rows[:2] == [
        {"tokens": ["Anna", "sleeps"], "tags": ["B-PER", "O"]},
        {"tokens": ["in", "New", "York"], "tags": ["O", "B-LOC", "I-LOC"]},
    ]
    if ending == "conll":  # the other may be a table
        test.write_text(content + "\n\nalone\n")
        with pytest.raises(UserError, match=r"not a word, a (tab|space) and a tag"):
            list(open_file(test).rows([]))


def test_semicolons_separate_where_the_header_has_no_comma(init, tmp_path):
    lines = [f"{TOY_LABELS[n % 3]};{text(n, random.Random(n))}, or so" for n in range(60)]
    data = tmp_path / "all.csv"
    data.write_text("\n".join(["queue;Body", *lines]))
    recipe, said = init(data)
    assert "It is read as values between semicolons." in said
    assert recipe["task"]["data"]["columns"] == {"text": "Body", "label": "queue"}
    data.write_text("text;or so,label\na,b\n")
    assert open_file(data).columns() == ["text;or so", "label"]


@pytest.mark.parametrize("indent", [None, 2])
def test_squads_nested_form_is_refused_with_the_way_out(indent, init, tmp_path):
    asked = {"question": "who?", "id": "1", "answers": [{"text": "b", "answer_start": 2}]}
    paragraphs = [{"context": "a b", "qas": [asked]}]
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}, indent=indent))
    with pytest.raises(UserError, match=r"SQuAD's nested form .* question, context and answers"):
        init(file)


def test_a_model_that_names_no_architecture_is_fine_tuned_first(models, tmp_path):
    copied = shutil.copytree(models / "first", tmp_path / "copied")
    kinds.change(copied / "config.json", architectures=None)
    for folder, has_head in ((models / "first", True), (copied, False)):
        [teacher] = read_teachers([str(folder)], "single-label", TOY_LABELS)
        assert teacher.has_head == has_head and bool(teacher.outputs) == has_head


def test_without_a_teacher_it_is_roberta_large(tmp_path, monkeypatch):
    data = write(tmp_path / "data", lambda n, d: {"text": "word " * 400, "label": "ab"[n % 2]})
    monkeypatch.chdir(tmp_path)
    assert "Without a GPU that takes days: name a small one" in ds_distill("init", data).output
    recipe = yaml.safe_load(Path("data.yaml").read_text())
    assert recipe["teachers"] == {"teacher": {"model": "FacebookAI/roberta-large"}}


def test_numbers_are_classes_or_numbers(init, tmp_path):
    cases = [(5, [], "single-label"), (50, [], "regression"), (5, ["--task", "regression"], None)]
    for most, options, task in cases:
        data = write(tmp_path / "data", labelled(lambda n, most=most: n % most), "csv")
        recipe, _ = init(data, *options)
        assert recipe["task"]["type"] == (task or "regression")


INTENTS = datasets.ClassLabel(names=[f"intent-{number}" for number in range(40)])
PLACES = datasets.ClassLabel(names=["O", "B-place", "I-place", "B-river", "I-river"])
WORDS = datasets.ClassLabel(names=["noun", "verb"])


def sentence(number, draw):
    """As conll2003 has them, with two columns of tags."""
    words = text(number, draw).split()
    return {"tokens": words, "pos": [n % 2 for n in range(len(words))], "ner": [3] * len(words)}


BOTH_TAGS = {"pos": datasets.List(WORDS), "ner": datasets.List(PLACES)}
NO_ENTITIES = {"pos": datasets.LargeList(WORDS)}
MANY = labelled(lambda n: n % 30, "what_for")
NUMBERS = labelled(lambda n: [n % 4, 4] if n % 3 else [], "labels")


@pytest.mark.parametrize(
    ("row", "named", "options", "wanted"),
    [
        (MANY, {"what_for": INTENTS}, [], ("single-label", INTENTS, None)),
        (NUMBERS, {"labels": datasets.List(PLACES)}, [], ("multi-label", PLACES, None)),
        (sentence, BOTH_TAGS, ["--label", "ner"], ("token-classification", PLACES, None)),
        (sentence, NO_ENTITIES, [], ("token-classification", WORDS, "accuracy")),
    ],
    ids=["more than 20, unusual name", "lists beside a text", "tags of a name", "no entities"],
)
def test_class_ids_with_names_are_classes(row, named, options, wanted, init, tmp_path):
    data = write(tmp_path / "data", row, "parquet", named=named)
    task = init(data, *options)[0]["task"]
    kind, declared, metric = wanted
    assert (task["type"], task["labels"]) == (kind, declared.names)
    assert metric is None or task["metric"] == metric
    if row is sentence:
        assert task["data"]["columns"] == {"tags": options[-1] if options else "pos"}


def test_of_several_columns_of_tags_one_is_asked_for(init, tmp_path):
    data = write(tmp_path / "data", sentence, "parquet", named=BOTH_TAGS)
    with pytest.raises(UserError, match=r"tags\?.*pos, ner\. Say which: --label"):
        init(data)
