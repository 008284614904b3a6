"""The forms in which files have labels: vectors of 0 and 1, numerals, -1, blanks, and class ids
whose column declares their names, in files and on the hub. Some are in label_forms.yaml."""

import json
import re
from pathlib import Path

import datasets
import kinds
import numpy as np
import pyarrow.parquet
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.data.batches import Units
from ds_distill.data.open_source import open_source
from ds_distill.data.predictions import open_predictions
from ds_distill.errors import UserError
from ds_distill.init.recipe import DataOptions, guess
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import (
    TASKS,
    Data,
    MultiLabel,
    Regression,
    SingleLabel,
    TokenClassification,
)

FORMS = yaml.safe_load(Path(__file__).with_name("label_forms.yaml").read_text(encoding="utf-8"))
ENDINGS = ("jsonl", "csv", "tsv", "parquet")
ABC = ["alpha", "beta", "gamma"]
TEXTS = ["text 0", "text 1"]


def write(path, labels, column="label"):
    return kinds.write(path, [{"text": f"text {n}", column: one} for n, one in enumerate(labels)])


def opened(folder, labels=None, *, many=False):
    kind = MultiLabel if many else SingleLabel
    return open_source(kind(data=Data(path=str(folder)), labels=labels), folder / "cache")


def labels_of(source, split="train"):
    return Units.of(source.read(split)).labels.tolist()


# ------------------------------------------------------------------------------ vectors of 0 and 1


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("case", FORMS["sets"])
def test_lists_of_0_and_1_for_each_label_are_vectors(case, ending, given, tmp_path):
    """`[0, 1, 0]` was the set {0, 1}: 24, 24, 0 examples of labels that have 8, 8 and 15."""
    count, lists, wanted = FORMS["sets"][case]
    write(tmp_path / f"train.{ending}", lists)
    source = opened(tmp_path, ABC[:count] if given else None, many=True)
    assert labels_of(source) == wanted
    assert source.labels == (ABC[:count] if given else [str(n) for n in range(count)])
    assert guess(tmp_path, DataOptions()).task == "multi-label"


@pytest.mark.parametrize("form", [int, float, bool])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_teachers_vectors_are_read_alike(ending, form, tmp_path):
    write(tmp_path / "train.jsonl", [["alpha"], ["beta"]])
    source = opened(tmp_path, ABC, many=True)
    vectors = [[form(one) for one in row] for row in [[0, 1, 0], [1, 0, 1]]]
    file = open_predictions(write(tmp_path / f"said.{ending}", vectors, "predicted"), source)
    keys = np.stack([file.high, file.low], axis=1)
    order = [int(np.flatnonzero((keys == key).all(1))[0]) for key in content_keys(TEXTS)]
    assert (file.logits[file.first[order]] > 0).tolist() == [[False, True, False], [1, 0, 1]]
    with pytest.raises(UserError, match=r"said\.jsonl:2: .* have 2 twice"):
        open_predictions(write(tmp_path / "said.jsonl", [[0], [2, 2]], "predicted"), source)


@pytest.mark.parametrize("kind", [datasets.List, datasets.LargeList])
def test_vectors_of_declared_classes_have_their_order(kind, tmp_path):
    names = datasets.ClassLabel(names=ABC)
    features = datasets.Features({"text": datasets.Value("string"), "label": kind(names)})
    for rows in ([[0, 1, 0], [1, 1, 0]], [[1], [0, 1]]):
        table = {"text": TEXTS, "label": rows}
        datasets.Dataset.from_dict(table, features).to_parquet(tmp_path / "train.parquet")
        assert labels_of(opened(tmp_path, many=True)) == [[0, 1, 0], [1, 1, 0]]
        assert labels_of(opened(tmp_path, ABC[::-1], many=True)) == [[0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("lists", "message"), FORMS["twice"])
def test_a_label_twice_is_refused_with_its_place(lists, message, ending, tmp_path):
    header = ending in ("csv", "tsv")
    write(tmp_path / f"train.{ending}", lists)
    with pytest.raises(UserError) as error:
        labels_of(opened(tmp_path, ABC, many=True))
    said = re.sub(r"(?<=csv:|tsv:)(\d+)", lambda n: str(int(n[0]) - header), str(error.value))
    said = re.sub(r"parquet, row ", "parquet:", said)
    assert re.search(rf"train\.{ending}:{message}", said), said


# ------------------------------------------------------------------------ numerals, blanks, -1


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("case", FORMS["spellings"])
def test_numbers_compare_by_value_and_blanks_do_not_count(case, ending, tmp_path):
    """1, 2, 3 beside 1.0, 2.0, 3.0 in train were the class ids of 2.0, 3.0 and none."""
    train, test, names, wanted = FORMS["spellings"][case]
    write(tmp_path / f"train.{ending}", train)
    write(tmp_path / f"test.{ending}", test)
    source = opened(tmp_path)
    assert source.labels == names
    assert labels_of(source, "test") == wanted
    probabilities = [{str(test[0]): 1.0}]
    file = write(tmp_path / "said.jsonl", probabilities, "probabilities")
    assert open_predictions(file, source).logits[0].argmax() == wanted[0]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("one", "other"), [(float, int), (int, float)])
def test_whole_floats_are_the_same_in_all_files(one, other, ending, tmp_path):
    """As pandas writes a column that lacked a label once."""
    for split, form in (("train", one), ("test", other)):
        write(tmp_path / f"{split}.{ending}", [form(number) for number in (1, 2, 3)])
    source = opened(tmp_path)
    assert source.labels == ["1", "2", "3"]
    assert labels_of(source) == labels_of(source, "test") == [0, 1, 2]
    ids = opened(tmp_path, ["none", "one", "two", "three"])
    assert labels_of(ids) == labels_of(ids, "test") == [1, 2, 3]
    assert labels_of(opened(tmp_path, ["3", "02", "1.0"]), "test") == [2, 1, 0]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("number", [1, 1.0, "1", "01"])
def test_where_names_are_those_of_train_a_number_is_none(number, ending, tmp_path):
    """1 was the class id of "2 stars"."""
    write(tmp_path / f"train.{ending}", ["1 star", "2 stars", "3 stars"])
    write(tmp_path / f"test.{ending}", [number])
    said = write(tmp_path / f"said.{ending}", [number], "predicted")
    declared, known = tmp_path / "labels.json", ending in ("csv", "tsv") or type(number) is not str
    if known:
        declared.write_text(json.dumps(["1 star", "2 stars", "3 stars"]))
        assert labels_of(opened(tmp_path), "test") == [1], "their order is known"
        assert open_predictions(said, opened(tmp_path)).logits[0].argmax() == 1
        declared.unlink()
    with pytest.raises(
        UserError, match=r"test\..*label .*1.* is not one of the 3 .*names in train"
    ):
        labels_of(opened(tmp_path), "test")
    with pytest.raises(UserError, match=r"said\..*label .*1.* is not one of the 3 labels"):
        open_predictions(said, opened(tmp_path))


def test_minus_one_is_a_number_where_numbers_are_predicted(tmp_path):
    write(tmp_path / "train.csv", ["-1", "01", "1.50"])
    task = Regression(data=Data(path=str(tmp_path)))
    assert labels_of(open_source(task, tmp_path / "cache")) == [-1, 1, 1.5]
    write(tmp_path / "train.csv", ["-1", "01", ""])
    with pytest.raises(UserError, match=r"csv:4: no label .*, or none\.$"):
        open_source(task, tmp_path / "cache").read("train")


def test_tags_of_train_give_numbers_no_meaning(tmp_path):
    for split, tags in (("train", ["noun", "verb"]), ("test", [0, 1])):
        row = {"tokens": ["a", "b"], "tags": tags}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = TokenClassification(data=Data(path=str(tmp_path)), metric="accuracy")
    with pytest.raises(UserError, match=r"test\.jsonl:1: label 0 .*not one of the 2 labels"):
        open_source(task, tmp_path / "cache").read("test")


def test_labels_that_are_given_may_be_told_apart_by_spelling(tmp_path):
    write(tmp_path / "train.csv", ["01", "1", "1.0"])
    assert labels_of(opened(tmp_path, ["01", "1"])) == [0, 1, 1]
    write(tmp_path / "train.csv", ["a", "a "])
    assert labels_of(opened(tmp_path, ["a ", "a"])) == [1, 0]


@pytest.mark.parametrize("ending", ENDINGS)
def test_minus_one_is_no_label_unless_it_is_named(ending, tmp_path):
    """0, 1 and -1 were three classes where nobody said the labels."""
    write(tmp_path / f"train.{ending}", [0, 1, 0])
    write(tmp_path / f"test.{ending}", [-1, -1])
    assert labels_of(opened(tmp_path), "test") == [-1, -1]
    write(tmp_path / f"train.{ending}", [0, 1, -1])
    with pytest.raises(UserError, match=r"train\..*no label.*-1 is none where task\.labels"):
        labels_of(opened(tmp_path))
    assert opened(tmp_path).labels == ["0", "1"]
    assert labels_of(opened(tmp_path, ["-1", "0", "1"])) == [1, 2, 0]
    write(tmp_path / f"train.{ending}", [1, -1])
    with pytest.raises(UserError, match=r"1 different label.*-1 is none\. Give all"):
        assert opened(tmp_path).labels
    for there, wanted in (("b", [0]), (None, [])):
        labels = {"1": "a", "-1": there}
        split = {"path": str(tmp_path / f"train.{ending}"), "labels": labels}
        data = Data(path=str(tmp_path), splits={"transfer": split})
        source = open_source(SingleLabel(data=data, labels=["b", "a"]), tmp_path / "cache")
        assert sorted(labels_of(source, "transfer")) == [*wanted, 1]


NAMES = ["O", "B-PER", "I-PER", "B-LOC"]
IDS = [[1, 2], [2, 0], [0, 1]]
"""The last name is of no example."""
DOCUMENTS = [["Ann", "Lee"], ["so", "so"], ["bad", "day"]]

LISTS = {
    "list": datasets.List,
    "large list": datasets.LargeList,
    "list of two": lambda feature: datasets.List(feature, length=2),
    "lists as datasets 3 has them": lambda feature: [feature],
}
KINDS = ("single-label", "multi-label", "token-classification")


def rows_of(kind, nested, more=None):
    """Three examples with ids of NAMES. more: the features of further columns, of id 1 each."""
    one, of_words = kind == "single-label", kind == "token-classification"
    texts = DOCUMENTS if of_words else list(map(" ".join, DOCUMENTS))
    text = datasets.Value("string")
    label = datasets.ClassLabel(names=NAMES)
    columns = {
        "tokens" if of_words else "text": (texts, datasets.List(text) if of_words else text),
        "tags" if of_words else "label": (
            [ids[0] for ids in IDS] if one else IDS,
            label if one else LISTS[nested](label),
        ),
        **{name: ([1, 1, 1], feature) for name, feature in (more or {}).items()},
    }
    features = datasets.Features({name: feature for name, (_, feature) in columns.items()})
    return datasets.Dataset.from_dict({name: v for name, (v, _) in columns.items()}, features)


def declared(folder, kind, data, labels, hub=False):
    path, more = folder / "data", {"metric": "accuracy"} if kind == "token-classification" else {}
    if not hub:
        path.mkdir(exist_ok=True)
        data.to_parquet(path / "train.parquet")
    given = {"path": "org/names" if hub else str(path)}
    task = TASKS[kind].model_validate({"data": given, "labels": labels, **more})
    with pytest.MonkeyPatch.context() as patch:
        found = datasets.DatasetDict({"train": data})
        patch.setattr(datasets, "load_dataset", lambda *_, **__: found)
        return open_source(task, folder / "cache")


def names_read(source):
    """Of each example the name of its label, the set of its labels, or its tags."""
    labels = source.read("train")["label"][:]
    if source.task.many_labels:
        return [{source.labels[at] for at in np.flatnonzero(has)} for has in labels]
    if source.task.of_words:
        return [[source.labels[tag] for tag in tags] for tags in labels]
    return [source.labels[label] for label in labels]


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    nested=st.sampled_from([*LISTS]),
    labels=st.none() | st.permutations(NAMES),
    hub=st.booleans(),
)
def test_class_ids_are_the_names_that_their_column_declares(
    tmp_path_factory, kind, nested, labels, hub
):
    source = declared(tmp_path_factory.mktemp("a"), kind, rows_of(kind, nested), labels, hub)
    assert source.labels == (labels or NAMES), "also a class that no example has"
    wanted = {
        "single-label": [NAMES[ids[0]] for ids in IDS],
        "multi-label": [{NAMES[number] for number in ids} for ids in IDS],
        "token-classification": [[NAMES[number] for number in ids] for ids in IDS],
    }
    assert names_read(source) == wanted[kind]


def test_a_file_of_an_old_sequence_has_its_names(tmp_path):
    """As datasets 3 wrote the column into parquet's metadata."""
    source = declared(
        tmp_path, "token-classification", rows_of("token-classification", "list"), None
    )
    file = tmp_path / "data" / "train.parquet"
    table = pyarrow.parquet.read_table(file)
    old = json.loads(table.schema.metadata[b"huggingface"])
    old["info"]["features"]["tags"]["_type"] = "Sequence"
    table = table.replace_schema_metadata({"huggingface": json.dumps(old)})
    pyarrow.parquet.write_table(table, file)
    assert source.labels == NAMES


def test_the_names_of_a_documents_label_are_none_of_its_tags(tmp_path):
    kind, document = "token-classification", {"label": datasets.ClassLabel(names=["neg", "pos"])}
    data = rows_of(kind, "list", document)
    assert declared(tmp_path, kind, data, None).labels == NAMES
    numbers = data.cast_column("tags", datasets.List(datasets.Value("int64")))
    source = declared(tmp_path, kind, numbers, None)
    assert source.labels == ["0", "1", "2"]
    assert names_read(source) == [[str(number) for number in ids] for ids in IDS]


def test_predicted_labels_in_lists_are_those_that_the_file_declares(tmp_path):
    labels = NAMES[::-1]
    data = rows_of("multi-label", "list")
    source = declared(tmp_path, "multi-label", data, labels)
    data.rename_column("label", "predicted").to_parquet(tmp_path / "llm.parquet")
    found = open_predictions(tmp_path / "llm.parquet", source)
    at = found.find(content_keys([" ".join(words) for words in DOCUMENTS]))
    has = found.logits[found.first[at]] > 0
    assert [{labels[n] for n in np.flatnonzero(row)} for row in has] == [
        {NAMES[number] for number in ids} for ids in IDS
    ]
