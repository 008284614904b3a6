"""Splits from other data, folds, limits, and the folder of data sets."""

import gzip
import json

import numpy as np
import pytest

from ds_distill.data.open_source import open_source
from ds_distill.recipe.tasks import MaskedLM, SingleLabel

PAIR, OWN = {"text": "text_a", "text_b": "text_b"}, {"train": "own_train", "validation": "own_val"}
BOOLQ = {"path": "data:boolq", "split": "dev"}


@pytest.mark.parametrize(
    ("transfer", "counts"),
    [
        ({**BOOLQ, "labels": {False: "no", True: "yes"}}, [1237, 2033]),
        ({**BOOLQ, "labels": "none"}, []),
        ({**BOOLQ, "randomise": {}}, []),
        ({"path": "data:pubmedqa", "labels": {"no": "no", "yes": "yes", "maybe": None}}, None),
    ],
)
def test_transfer_sets_of_real_data(transfer, counts, shared_data, tmp_path):
    data = {"path": "data:pubmedqa", "splits": {"transfer": transfer}}
    task = SingleLabel.model_validate({"data": data, "labels": ["yes", "no", "maybe"]})
    source = open_source(task, tmp_path, data_folder=str(shared_data))
    assert source.splits == ["train", "validation", "test", "transfer"]
    data = source.read("transfer")
    assert "text_b" in data.column_names
    if counts is None:
        assert set(data["label"][:]) == {0, 1} and len(data) < len(source.read("train"))
    elif counts:
        assert np.bincount(data["label"][:]).tolist() == counts[::-1]
    else:
        assert len(data) == 3270 and set(data["label"][:]) == {-1}


def test_the_folds_of_gad_and_the_files_of_euadr(shared_data, tmp_path):
    gad = {"path": "data:re_gad_blurb"}
    folds = {"number": 10, "fold": 1, "of": ["train", "validation", "test"]}
    sizes = []
    for number in range(1, 11):
        task = SingleLabel.model_validate({"data": {**gad, "folds": {**folds, "fold": number}}})
        source = open_source(task, tmp_path, data_folder=str(shared_data))
        sizes.append(len(source.read("test")))
        assert sum(len(source.read(split)) for split in source.splits) == 5330
    assert sum(sizes) == 5330 and min(sizes) > 450 and max(sizes) < 620
    splits = {"train": "fold3_train", "test": "fold3_test"}
    euadr = {"data": {"path": "data:re_euadr_10fold", "splits": splits}}
    task = SingleLabel.model_validate(euadr)
    source = open_source(task, tmp_path, data_folder=str(shared_data))
    assert len(source.read("train")) > 300 and len(source.read("test")) > 20


@pytest.mark.parametrize(
    ("folder", "data", "counts"),
    [
        ("tweeteval_emotion", {}, {"train": 3257, "validation": 374, "test": 1421}),
        ("re_gad_blurb", {}, {"train": 4261, "validation": 535, "test": 534}),
        ("re_ddi", {}, {"train": 25296, "validation": 2496, "test": 5716}),
        ("boolq", {"columns": PAIR, "splits": OWN}, {"train": 2370, "validation": 300}),
    ],
)
def test_real_data_sets_are_read(folder, data, counts, shared_data, tmp_path):
    path = shared_data / folder
    task = SingleLabel.model_validate({"data": {"path": str(path), **data}})
    source = open_source(task, tmp_path)
    assert source.labels == json.loads((path / "labels.json").read_text())
    for split, count in counts.items():
        found = source.read(split, need_labels=True)
        assert len(found) == count
        assert set(found["label"][:]) == set(range(len(source.labels)))


def test_the_wikipedia_texts_are_read(shared_data, tmp_path):
    folder = shared_data / "raw_general"
    names = {"train": "wikipedia_en_valid", "validation": "wikitext2_valid.txt.gz"}
    task = MaskedLM.model_validate({"data": {"path": str(folder), "splits": names}})
    with gzip.open(folder / "wikipedia_en_valid.txt.gz", "rt") as file:
        lines = [line.strip() for line in file.read().split("\n")]
    found = open_source(task, tmp_path).read("train")
    assert found["text"][:] == [line for line in lines if line]
