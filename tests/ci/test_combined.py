"""Splits from other data, folds, limits, and the folder of data sets."""

from __future__ import annotations

import numpy as np
import pytest

from ds_distill.data.open_source import open_source
from ds_distill.recipe.tasks import SingleLabel

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
    task = SingleLabel.model_validate(
        {
            "data": {"path": "data:pubmedqa", "splits": {"transfer": transfer}},
            "labels": ["yes", "no", "maybe"],
        }
    )
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
    euadr = {"path": "data:re_euadr_10fold", "splits": splits}
    source = open_source(
        SingleLabel.model_validate({"data": euadr}), tmp_path, data_folder=str(shared_data)
    )
    assert len(source.read("train")) > 300 and len(source.read("test")) > 20
