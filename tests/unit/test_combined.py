"""Splits from other data, folds, limits, and the folder of data sets."""

from itertools import chain

import datasets
import kinds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.data.open_source import open_source
from ds_distill.data.sources import has_labels
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import TASKS, SingleLabel

OURS = ["no", "yes"]


def write(path, rows, names=("text", "label")):
    kinds.write(path, [dict(zip(names, row, strict=True)) for row in rows])


def task(root, labels=OURS, **data):
    return SingleLabel.model_validate(
        {"data": {"path": str(root / "own"), **data}, "labels": labels}
    )


def rows_of(data):
    return list(zip(data["text"][:], data["label"][:], strict=True))


@pytest.fixture
def root(tmp_path):
    """A task of yes and no in own/, and other data beside it."""
    write(tmp_path / "own/train.jsonl", [("a", "yes"), ("b", "no")])
    write(tmp_path / "own/dev.jsonl", [("c", "no")])
    write(
        tmp_path / "other/dev.jsonl",
        [("d", True), ("e", False), ("f", "maybe"), ("g", True)],
    )
    return tmp_path


def opened(task, root, **options):
    return open_source(task, root / "cache", **options)


# ------------------------------------------------------------------- splits from other data


def from_other(root, **split):
    return {"transfer": {"path": str(root / "other"), "split": "dev", **split}}


def test_labels_of_other_data_are_mapped_and_rows_may_be_left_out(root):
    labels = {False: "no", True: "yes", "maybe": None}
    source = opened(task(root, splits=from_other(root, labels=labels)), root)
    assert source.splits == ["train", "validation", "transfer"]
    data = source.read("transfer", need_labels=True)
    assert rows_of(data) == [("d", 1), ("e", 0), ("g", 1)]
    assert [data["key_hi"][0], data["key_lo"][0]] == content_keys(["d"])[0].tolist()
    assert rows_of(source.read("train")) == [("a", 1), ("b", 0)]
    assert source.labels == OURS


@pytest.mark.parametrize("ids", [(1, 0, 1), ("true", "false", "true"), (True, False, True)])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_their_labels_may_be_names_numbers_and_booleans(ids, ending, root):
    rows = list(zip(["x", "y", "z"], ids, strict=True))
    write(root / "ids/train.jsonl", rows)
    if ending == "parquet":
        (root / "ids/train.jsonl").unlink()
        table = {"text": ["x", "y", "z"], "label": list(ids)}
        datasets.Dataset.from_dict(table).to_parquet(root / "ids/train.parquet")
    names = {1: "no", 0: "yes"} if type(ids[0]) is int else {"true": "no", False: "yes"}
    split = {"transfer": {"path": str(root / "ids"), "labels": names}}
    assert opened(task(root, splits=split), root).read("transfer")["label"][:] == [0, 1, 0]


def test_their_class_ids_are_not_taken_for_ours(root):
    write(root / "ids/train.jsonl", [("x", 1), ("y", 0)])
    (root / "ids/labels.json").write_text('["yes", "no"]')  # ours: no, yes
    split = {"transfer": {"path": str(root / "ids")}}
    assert opened(task(root, splits=split), root).read("transfer")["label"][:] == [0, 1]


def test_labels_none_reads_no_label(root):
    write(root / "odd/train.jsonl", [("d", ["a", "list"]), ("e", 0.5)])
    split = {"transfer": {"path": str(root / "odd"), "labels": "none"}}
    source = opened(task(root, splits=split), root)
    assert rows_of(source.read("transfer")) == [("d", -1), ("e", -1)]
    with pytest.raises(UserError, match=r"task.data.splits.transfer.labels=none: .*no labels"):
        source.read("transfer", need_labels=True)


def test_other_data_may_have_no_labels_or_the_same(root):
    write(root / "texts/train.jsonl", [("d",), ("e",)], ["text"])
    write(root / "same.jsonl", [("d", "yes"), ("e", "no")])
    splits = {"a": {"path": str(root / "texts")}, "b": {"path": str(root / "same.jsonl")}}
    source = opened(task(root, splits=splits), root)
    assert rows_of(source.read("a")) == [("d", -1), ("e", -1)]
    assert rows_of(source.read("b")) == [("d", 1), ("e", 0)]
    with pytest.raises(UserError, match=r"no column 'label' \(task.data.splits.a.columns.label\)"):
        source.read("a", need_labels=True)


@pytest.mark.parametrize("mapping", [None, {"yes": "yes"}, {"yes": "no"}])
def test_other_data_may_have_one_class_or_an_empty_column(mapping, root):
    """As hard negatives. They were refused: a task needs two labels; so were rows without any."""
    write(root / "one.jsonl", [("d", "yes"), ("e", "yes")])
    (root / "none.csv").write_text("text,label\nf,\ng,\n")
    splits = {
        "a": {"path": str(root / "one.jsonl"), **({"labels": mapping} if mapping else {})},
        "b": {"path": str(root / "none.csv")},
    }
    source = opened(task(root, splits=splits), root)
    number = OURS.index("yes" if mapping is None else mapping["yes"])
    assert rows_of(source.read("a", need_labels=True)) == [("d", number), ("e", number)]
    assert rows_of(source.read("b")) == [("f", -1), ("g", -1)]
    with pytest.raises(UserError, match="label"):
        source.read("b", need_labels=True)


@pytest.mark.parametrize(
    ("kind", "ours"), [("regression", 0.5), ("multi-label", ["yes"]), ("single-label", "yes")]
)
def test_parts_without_labels_are_one_split_whatever_their_files(kind, ours, root):
    """Their columns stood in another order, or their labels had another type."""
    write(root / "own/train.jsonl", [("a", ours), ("b", ours)])
    (root / "own/dev.jsonl").unlink()
    (root / "b.txt").write_text("one\ntwo\n")
    write(root / "null.jsonl", [("three", None)])
    write(root / "odd.jsonl", [("four", ours)])
    parts = [
        {"path": str(root / "b.txt")},
        {"path": str(root / "null.jsonl")},
        {"path": str(root / "odd.jsonl"), "labels": "none"},
    ]
    given = {"type": kind, "data": {"path": str(root / "own"), "splits": {"transfer": parts}}}
    given |= {} if kind == "regression" else {"labels": OURS}
    made = TASKS[kind].model_validate(given)
    data = opened(made, root).read("transfer")
    assert data["text"][:] == ["one", "two", "three", "four"]
    assert not has_labels(data)


def test_folds_of_own_and_other_data(root):
    """The label's column stood last in one, and first in the other."""
    write(root / "own/train.jsonl", [(f"t {n}", OURS[n % 2]) for n in range(20)])
    write(root / "more.jsonl", [(f"m {n}", OURS[n % 2]) for n in range(20)])
    more = {"more": {"path": str(root / "more.jsonl")}}
    found = []
    for number in (1, 2):
        folds = {"number": 2, "fold": number, "of": ["train", "more"]}
        source = opened(task(root, splits=more, folds=folds), root)
        found += rows_of(source.read("test", need_labels=True))
    expected = [(f"{name} {n}", n % 2) for name in "tm" for n in range(20)]
    assert sorted(found) == sorted(expected)


def test_a_file_that_nothing_reads_stops_nothing(root):
    (root / "own/notes.txt").touch()
    source = opened(task(root, labels=None), root)
    assert source.labels == OURS and len(source.read("train")) == 2
    with pytest.raises(UserError, match=r"notes.txt: the file is empty"):
        source.read("notes")


def test_named_splits_and_other_data_stand_side_by_side(root):
    splits = {"train": "dev", **from_other(root, labels="none")}
    source = opened(task(root, splits=splits), root)
    assert source.splits == ["train", "transfer"]
    assert source.read("train")["text"][:] == ["c"]


def test_a_split_of_docstrings(root):
    split = {"transfer": {"path": "docstrings:json,csv", "split": "transfer", "labels": "none"}}
    data = opened(task(root, splits=split), root).read("transfer")
    assert set(data["label"][:]) == {-1} and "class" not in data.column_names


def test_locations_are_those_of_the_other_data(root):
    source = opened(task(root, splits=from_other(root, labels="none")), root)
    [key] = map(tuple, content_keys(["e"]).tolist())
    assert source.locations("transfer", {key})[key].endswith("other/dev.jsonl:2")


# ------------------------------------------------------------------------------------ pairs


def test_text_a_and_text_b_are_found_only_where_there_is_no_text(root):
    names = ["text_a", "text_b", "label"]
    write(root / "own/train.jsonl", [("a", "b", "yes"), ("ab", "", "no")], names)
    write(root / "own/test.jsonl", [("a", "t", "b", "yes")], ["text_a", "text", "text_b", "label"])
    source = opened(task(root), root)
    data = source.read("train")
    assert (data["text"][:], data["text_b"][:]) == (["a", "ab"], ["b", ""])
    [key] = map(tuple, content_keys(["ab"], [""]).tolist())
    assert source.locations("train", {key})[key].endswith("train.jsonl:2")
    assert source.read("test").column_names == [
        "text",
        "label",
        "key_hi",
        "key_lo",
        "copy",
        "group",
    ]
    write(root / "own/train.jsonl", [("a", "yes")], ["text_a", "label"])
    with pytest.raises(UserError, match="no column 'text'"):
        opened(task(root), root).read("train")


# ------------------------------------------------------------------------------------ limit


@settings(max_examples=12, deadline=None)
@given(
    texts=st.sets(st.text(max_size=3), min_size=2, max_size=30),
    random=st.randoms(use_true_random=False),
)
def test_a_limit_does_not_depend_on_the_order_and_is_nested(texts, random, tmp_path_factory):
    def kept(order, limit):
        root = tmp_path_factory.mktemp("limit")
        write(root / "own/train.jsonl", [(text, "yes") for text in order])
        data = opened(task(root, limit={"train": limit}), root).read("train")
        assert data["text"][:] == [text for text in order if text in set(data["text"][:])]
        return data["text"][:]

    order = sorted(texts)
    shuffled = random.sample(order, len(order))
    small, large = kept(order, len(order) // 2), kept(order, len(order) // 2 + 1)
    assert len(small) == len(order) // 2 and len(large) == len(small) + 1
    assert set(small) <= set(large) and set(kept(shuffled, len(small))) == set(small)


def test_a_limit_comes_after_the_cap_per_class(root):
    write(root / "own/train.jsonl", [(f"text {n}", OURS[n % 2]) for n in range(40)])
    both = opened(task(root, per_class={"train": 4}, limit={"train": 6}), root).read("train")
    capped = opened(task(root, per_class={"train": 4}), root).read("train")
    assert len(both) == 6 and set(rows_of(both)) <= set(rows_of(capped))
    assert len(opened(task(root, limit={"train": 99}), root).read("train")) == 40


# ------------------------------------------------------------------------------------ folds


def fold(root, number, of, folds):
    source = opened(task(root, folds={"number": folds, "fold": number, "of": of}), root)
    return {split: source.read(split)["text"][:] for split in source.splits}


@settings(max_examples=4, deadline=None)
@given(folds=st.integers(2, 5), repeated=st.lists(st.integers(0, 99), max_size=30))
def test_the_folds_are_disjoint_and_cover_all(folds, repeated, tmp_path_factory):
    root = tmp_path_factory.mktemp("folds")
    texts = [f"text {number}" for number in [*range(100), *repeated]]
    write(root / "own/train.jsonl", [(text, "yes") for text in texts[:70]])
    write(root / "own/dev.jsonl", [(text, "no") for text in texts[70:]])
    tested = []
    for number in range(1, folds + 1):
        splits = fold(root, number, ["train", "validation"], folds)
        assert sorted(chain(*splits.values())) == sorted(texts)
        assert not set(splits["test"]) & (set(splits["train"]) | set(splits["validation"]))
        assert set(splits["train"]) <= set(texts[:70])
        tested += splits["test"]
    assert sorted(tested) == sorted(texts)


def test_examples_of_a_test_split_go_to_the_first(root):
    texts = {"train": range(60), "dev": range(60, 80), "test": range(80, 100)}
    for name, numbers in texts.items():
        write(root / f"own/{name}.jsonl", [(f"text {n}", "yes") for n in numbers])
    splits = fold(root, 2, ["train", "test"], 4)
    assert splits["validation"] == [f"text {n}" for n in texts["dev"]]
    assert sorted(splits["train"] + splits["test"]) == sorted(
        f"text {n}" for n in [*texts["train"], *texts["test"]]
    )
    with pytest.raises(UserError, match=r"own split 'test'.*task.data.folds.of=\[train, test\]"):
        fold(root, 2, ["train"], 4)


def test_folds_of_docstrings_hold_whole_files(tmp_path):
    data = {"path": "docstrings:json,email,asyncio", "splits": {"train": "train"}}
    folds = {"number": 2, "fold": 1}
    task = SingleLabel.model_validate({"data": {**data, "folds": folds}})
    source = open_source(task, tmp_path)
    groups = [set(source.read(split)["group"][:]) for split in ("train", "test")]
    assert groups[0] and groups[1] and not groups[0] & groups[1]


def test_folds_of_unlike_splits_are_refused(root):
    write(root / "own/train.jsonl", [(f"t {n}", "yes") for n in range(30)])
    write(root / "own/dev.jsonl", [(f"v {n}",) for n in range(30)], ["text"])
    with pytest.raises(UserError, match=r"task.data.folds.of: train, validation .*some have"):
        fold(root, 1, ["train", "validation"], 2)


# --------------------------------------------------------------------- the folder of data sets


def test_data_by_name(root):
    by_name = SingleLabel.model_validate(
        {
            "data": {"path": "data:own", "splits": {"a": {"path": "data:other/dev.jsonl"}}},
            "labels": ["true", "false", "maybe"],
        }
    )
    source = opened(by_name, root, data_folder=str(root))
    assert source.read("a")["label"][:] == [0, 1, 2, 0]
    with pytest.raises(UserError, match=r"train.jsonl:1: label 'yes'"):
        source.read("train")


# --------------------------------------------------------------------- a split of several parts


def test_a_split_may_have_several_parts(root):
    write(root / "one.jsonl", [("x", OURS[0]), ("y", OURS[1])])
    one = {"path": str(root / "one.jsonl")}
    parts = [{**one, "labels": "none"}, from_other(root, labels="none")["transfer"]]

    def source(*parts):
        return opened(task(root, splits={"transfer": [*parts]}), root)

    alone = [row for part in parts for row in rows_of(source(part).read("transfer"))]
    both = source(*parts).read("transfer")
    assert rows_of(both) == alone and len(both) == 6
    keys = {(row["key_hi"], row["key_lo"]) for row in both}
    places = source(*parts).locations("transfer", keys)
    assert len(places) == len(keys) and len({place.split(":")[0] for place in places.values()}) == 2
    limited = task(root, splits={"transfer": parts[1]}, limit={"transfer": 2})
    fewer = rows_of(source({**parts[1], "limit": 2}, parts[0]).read("transfer"))
    assert fewer[:2] == rows_of(opened(limited, root).read("transfer")) and len(fewer) == 4
    with pytest.raises(UserError, match=r"splits.transfer: .* labels and others none"):
        source(one, parts[0]).read("transfer")
    with pytest.raises(UserError, match=r"task.data.splits.transfer.1.path"):
        source(one, {"path": str(root / "nothing.jsonl")})
