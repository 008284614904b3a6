"""Class ids whose column declares their names: the names count, whatever the order of the labels,
for one label, for lists of them and for tags, in files and on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.data.open_source import open_source
from ds_distill.data.predictions import open_predictions
from ds_distill.data.sources import Source
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import TASKS

NAMES = ["O", "B-PER", "I-PER", "B-LOC"]
IDS = [[1, 2], [2, 0], [0, 1]]
"""The last name is of no example."""
TEXTS = [["Ann", "Lee"], ["so", "so"], ["bad", "day"]]

LISTS: dict[str, Any] = {
    "list": datasets.List,
    "large list": datasets.LargeList,
    "list of two": lambda feature: datasets.List(feature, length=2),
    "lists as datasets 3 has them": lambda feature: [feature],
}
KINDS = ("single-label", "multi-label", "token-classification")


def rows_of(kind: str, nested: str, more: dict[str, Any] | None = None) -> datasets.Dataset:
    """Three examples with ids of NAMES. more: the features of further columns, of id 1 each."""
    one, of_words = kind == "single-label", kind == "token-classification"
    texts: list[Any] = TEXTS if of_words else list(map(" ".join, TEXTS))
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


def opened(
    folder: Path, kind: str, data: datasets.Dataset, labels: list[str] | None, hub: bool = False
) -> Source:
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


def names_read(source: Source) -> list[Any]:
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
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    nested: str,
    labels: list[str] | None,
    hub: bool,
) -> None:
    source = opened(tmp_path_factory.mktemp("a"), kind, rows_of(kind, nested), labels, hub)
    assert source.labels == (labels or NAMES), "also a class that no example has"
    wanted = {
        "single-label": [NAMES[ids[0]] for ids in IDS],
        "multi-label": [{NAMES[number] for number in ids} for ids in IDS],
        "token-classification": [[NAMES[number] for number in ids] for ids in IDS],
    }
    assert names_read(source) == wanted[kind]


def test_a_file_of_an_old_sequence_has_its_names(tmp_path: Path) -> None:
    """As datasets 3 wrote the column into parquet's metadata."""
    source = opened(tmp_path, "token-classification", rows_of("token-classification", "list"), None)
    file = tmp_path / "data" / "train.parquet"
    table = pyarrow.parquet.read_table(file)
    old = json.loads(table.schema.metadata[b"huggingface"])
    old["info"]["features"]["tags"]["_type"] = "Sequence"
    table = table.replace_schema_metadata({"huggingface": json.dumps(old)})
    pyarrow.parquet.write_table(table, file)
    assert source.labels == NAMES


def test_the_names_of_a_documents_label_are_none_of_its_tags(tmp_path: Path) -> None:
    kind, document = "token-classification", {"label": datasets.ClassLabel(names=["neg", "pos"])}
    data = rows_of(kind, "list", document)
    assert opened(tmp_path, kind, data, None).labels == NAMES
    numbers = data.cast_column("tags", datasets.List(datasets.Value("int64")))
    source = opened(tmp_path, kind, numbers, None)
    assert source.labels == ["0", "1", "2"]
    assert names_read(source) == [[str(number) for number in ids] for ids in IDS]


def test_predicted_labels_in_lists_are_those_that_the_file_declares(tmp_path: Path) -> None:
    labels = NAMES[::-1]
    data = rows_of("multi-label", "list")
    source = opened(tmp_path, "multi-label", data, labels)
    data.rename_column("label", "predicted").to_parquet(tmp_path / "llm.parquet")
    found = open_predictions(tmp_path / "llm.parquet", source)
    at = found.find(content_keys([" ".join(words) for words in TEXTS]))
    has = found.logits[found.first[at]] > 0
    assert [{labels[n] for n in np.flatnonzero(row)} for row in has] == [
        {NAMES[number] for number in ids} for ids in IDS
    ]
