"""The forms in which files have labels: vectors of 0 and 1, numerals, -1, blanks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import kinds
import numpy as np
import pytest

from ds_distill.data.batches import Examples
from ds_distill.data.open_source import open_source
from ds_distill.data.predictions import open_predictions
from ds_distill.data.sources import Source
from ds_distill.errors import UserError
from ds_distill.init.recipe import DataOptions, guess
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import Data, MultiLabel, Regression, SingleLabel, TokenClassification

ENDINGS = ("jsonl", "csv", "tsv", "parquet")
ABC = ["alpha", "beta", "gamma"]
TEXTS = ["text 0", "text 1"]


def write(path: Path, labels: list[Any], column: str = "label") -> Path:
    return kinds.write(path, [{"text": f"text {n}", column: one} for n, one in enumerate(labels)])


def opened(folder: Path, labels: list[str] | None = None, *, many: bool = False) -> Source:
    kind = MultiLabel if many else SingleLabel
    return open_source(kind(data=Data(path=str(folder)), labels=labels), folder / "cache")


def labels_of(source: Source, split: str = "train") -> list[Any]:
    found: list[Any] = Examples.of(source.read(split)).labels.tolist()
    return found


# ------------------------------------------------------------------------------ vectors of 0 and 1

SETS: dict[str, tuple[int, list[Any], list[list[int]]]] = {
    # of how many labels, the lists, and which of the labels each says
    "vectors": (3, [[0, 1, 0], [1, 1, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1], [0, 0, 0]]),
    "floats": (3, [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]], [[0, 1, 0], [1, 1, 0]]),
    "booleans": (3, [[False, True, False], [True, True, False]], [[0, 1, 0], [1, 1, 0]]),
    "of two": (2, [[0, 1], [1, 0], [1, 1]], [[0, 1], [1, 0], [1, 1]]),
    "of two, as all labels in every row": (2, [[0, 1], [0, 1]], [[0, 1], [0, 1]]),
    "sets of ids": (3, [[0, 1], [2], []], [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "sets of ids as floats": (3, [[0.0, 1.0], [2.0]], [[1, 1, 0], [0, 0, 1]]),
    "sets of as many ids": (3, [[1, 0, 2]], [[1, 1, 1]]),
    "sets of two": (2, [[0, 1], [1], []], [[1, 1], [0, 1], [0, 0]]),
    "one id": (2, [[0], [1]], [[1, 0], [0, 1]]),
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("case", SETS)
def test_lists_of_0_and_1_for_each_label_are_vectors(
    case: str, ending: str, given: bool, tmp_path: Path
) -> None:
    """`[0, 1, 0]` was the set {0, 1}: 24, 24, 0 examples of labels that have 8, 8 and 15."""
    count, lists, wanted = SETS[case]
    write(tmp_path / f"train.{ending}", lists)
    source = opened(tmp_path, ABC[:count] if given else None, many=True)
    assert labels_of(source) == wanted
    assert source.labels == (ABC[:count] if given else [str(n) for n in range(count)])
    assert guess(tmp_path, DataOptions()).task == "multi-label"


@pytest.mark.parametrize("form", [int, float, bool])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_teachers_vectors_are_read_alike(ending: str, form: type, tmp_path: Path) -> None:
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
def test_vectors_of_declared_classes_have_their_order(kind: Any, tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=ABC)
    features = datasets.Features({"text": datasets.Value("string"), "label": kind(names)})
    for rows in ([[0, 1, 0], [1, 1, 0]], [[1], [0, 1]]):
        table = {"text": TEXTS, "label": rows}
        datasets.Dataset.from_dict(table, features).to_parquet(tmp_path / "train.parquet")
        assert labels_of(opened(tmp_path, many=True)) == [[0, 1, 0], [1, 1, 0]]
        assert labels_of(opened(tmp_path, ABC[::-1], many=True)) == [[0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["alpha"], ["beta", "beta"]], r"2: .* have 'beta' twice\. Name each once\.$"),
        ([["alpha"], ["beta", " beta"]], r"2: .* have ' beta' twice"),
        ([[0, 1], [2, 1, 2]], r"2: .* have 2 twice"),
        ([[0, 1, 0], [0, 1]], r"1: .* have 0 twice.*each of the 3 labels.* \S+2 has something"),
        ([[0, 1, 0, 1]], r"1: .* have 0 twice.*each of the 3 labels in every row"),
        ([[0, 1, 2], [0, 0, 1]], r"2: .* have 0 twice"),
        ([[0, 1, -1]], r"1: a label .* is -1\. Take it out"),
    ],
)
def test_a_label_twice_is_refused_with_its_place(
    lists: list[Any], message: str, ending: str, tmp_path: Path
) -> None:
    header = ending in ("csv", "tsv")
    write(tmp_path / f"train.{ending}", lists)
    with pytest.raises(UserError) as error:
        labels_of(opened(tmp_path, ABC, many=True))
    said = re.sub(r"(?<=csv:|tsv:)(\d+)", lambda n: str(int(n[0]) - header), str(error.value))
    said = re.sub(r"parquet, row ", "parquet:", said)
    assert re.search(rf"train\.{ending}:{message}", said), said


# ------------------------------------------------------------------------ numerals, blanks, -1

SPELLINGS: dict[str, tuple[list[Any], list[Any], list[str], list[int]]] = {
    # train's labels, test's, the labels' names, and test's class ids
    "floats in train": (["1.0", "2.0", "3.0"], ["1", "2", "3"], ["1", "2", "3"], [0, 1, 2]),
    "floats in test": (["1", "2", "3"], ["1.0", "3.0", "2."], ["1", "2", "3"], [0, 2, 1]),
    "many floats": (["2.0", "10.0", "2.0"], ["10"], ["2", "10"], [1]),
    "zeros before": (["01", "02", "10"], ["1", "2", "10.0"], ["01", "02", "10"], [0, 1, 2]),
    "zeros and none": (["01", "1", "2"], ["1", "01"], ["1", "2"], [0, 0]),
    "not all whole": (["1.0", "1.5", "2.0"], ["1", "1.5"], ["1.0", "1.5", "2.0"], [0, 1]),
    "blanks": (["a ", "a", "b"], ["a", " b", "a\u00a0"], ["a", "b"], [0, 1, 0]),
    "blanks and numbers": ([" 1", "2 "], ["1", " 02"], ["1", "2"], [0, 1]),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("case", SPELLINGS)
def test_numbers_compare_by_value_and_blanks_do_not_count(
    case: str, ending: str, tmp_path: Path
) -> None:
    """1, 2, 3 beside 1.0, 2.0, 3.0 in train were the class ids of 2.0, 3.0 and none."""
    train, test, names, wanted = SPELLINGS[case]
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
def test_whole_floats_are_the_same_in_all_files(
    one: type, other: type, ending: str, tmp_path: Path
) -> None:
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
def test_where_names_are_those_of_train_a_number_is_none(
    number: Any, ending: str, tmp_path: Path
) -> None:
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


def test_minus_one_is_a_number_where_numbers_are_predicted(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", ["-1", "01", "1.50"])
    task = Regression(data=Data(path=str(tmp_path)))
    assert labels_of(open_source(task, tmp_path / "cache")) == [-1, 1, 1.5]
    write(tmp_path / "train.csv", ["-1", "01", ""])
    with pytest.raises(UserError, match=r"csv:4: no label .*, or none\.$"):
        open_source(task, tmp_path / "cache").read("train")


def test_tags_of_train_give_numbers_no_meaning(tmp_path: Path) -> None:
    for split, tags in (("train", ["noun", "verb"]), ("test", [0, 1])):
        row = {"tokens": ["a", "b"], "tags": tags}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = TokenClassification(data=Data(path=str(tmp_path)), metric="accuracy")
    with pytest.raises(UserError, match=r"test\.jsonl:1: label 0 .*not one of the 2 labels"):
        open_source(task, tmp_path / "cache").read("test")


def test_labels_that_are_given_may_be_told_apart_by_spelling(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", ["01", "1", "1.0"])
    assert labels_of(opened(tmp_path, ["01", "1"])) == [0, 1, 1]
    write(tmp_path / "train.csv", ["a", "a "])
    assert labels_of(opened(tmp_path, ["a ", "a"])) == [1, 0]


@pytest.mark.parametrize("ending", ENDINGS)
def test_minus_one_is_no_label_unless_it_is_named(ending: str, tmp_path: Path) -> None:
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
