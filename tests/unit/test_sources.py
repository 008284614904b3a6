"""Data sources: every format, files that are too large or no files, the cap per class, the cache of
converted files, the hub."""

import errno
import gzip
import json
import os
import re
import threading
import time
from itertools import product

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import any_letter, write

from ds_distill.data.columns import build_once, keep_per_class
from ds_distill.data.open_source import open_source
from ds_distill.data.readers import open_file
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import Data, SingleLabel

ROWS = [("good day", "joy"), ("bad day", "anger"), ("so, so", "joy"), ("läuft", "anger")]
MOODS = ["anger", "joy"]


def task(path, labels=None, **data):
    return SingleLabel(data=Data(path=str(path), **data), labels=labels)


def texts(path, rows=ROWS, names=("text", "label")):
    return write(path, [dict(zip(names, row, strict=True)) for row in rows])


@pytest.fixture
def read(tmp_path):
    """Read a split of a task with a cache of its own."""

    def read(task, split="train", **options):
        return open_source(task, tmp_path / "cache").read(split, **options)

    return read


# -------------------------------------------------------------------------------- good input

ENDINGS = ("jsonl", "jsonl.gz", "json", "json.gz", "csv", "csv.gz", "tsv", "tsv.gz", "parquet")
PAIRS = {"text": "question", "text_b": "answer", "label": "verdict"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_of_each_kind_gives_the_same_examples(ending, tmp_path, read):
    data = read(task(texts(tmp_path / f"mine.{ending}")))
    assert data.features["label"].dtype == data.features["key_hi"].dtype == "int64"
    marks = ["key_hi", "key_lo", "copy", "group"]
    assert data.column_names == ["text", "label", *marks]
    assert data["text"][:] == [text for text, _ in ROWS]
    assert data["label"][:] == [1, 0, 1, 0]  # sorted names: anger, joy
    keys = content_keys([text for text, _ in ROWS])
    np.testing.assert_array_equal(np.stack([data["key_hi"], data["key_lo"]], axis=1), keys)
    rows = [("a", "b", "x", 1), ("ab", "", "y", 2)]
    path = texts(tmp_path / f"pairs.{ending}", rows, (*PAIRS.values(), "number"))
    data = read(task(path, columns=PAIRS))
    assert data.column_names == ["text", "text_b", "label", *marks]
    assert data["text_b"][:] == ["b", ""]
    np.testing.assert_array_equal(data["key_lo"], content_keys(["a", "ab"], ["b", ""])[:, 1])


def test_the_splits_of_a_folder_are_found_by_their_names(tmp_path):
    """Endings may be capitals."""
    for name in ("test.csv", "dev.jsonl.gz", "extra.json", "train.parquet"):
        texts(tmp_path / name)
    (tmp_path / "test.csv").rename(tmp_path / "test.CSV")
    (tmp_path / "labels.json").write_text('["joy", "anger"]')
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.csv").write_text("not data")
    source = open_source(task(tmp_path), tmp_path / "cache")
    assert source.splits == ["train", "validation", "test", "extra"]
    assert source.labels == ["joy", "anger"]
    assert all(source.read(split)["label"][:] == [0, 1, 0, 1] for split in source.splits)
    splits = {"train": "extra", "validation": "dev.jsonl.gz"}
    assert open_source(task(tmp_path, splits=splits), tmp_path / "cache").splits == list(splits)


@pytest.mark.parametrize(
    ("labels", "given", "ids"),
    [
        (MOODS, [1, 0, 1], [1, 0, 1]),  # class ids
        (["1", "0"], [1, 0, 1], [0, 1, 0]),  # names that are numbers
        (["-1", "0", "1"], [-1, 0, 1], [0, 1, 2]),
        (None, [10, 9, 10], [1, 0, 1]),  # sorted as numbers
        (None, ["10", "9", "10"], [1, 0, 1]),
        (None, [2.0, 0.0, 2.0], [1, 0, 1]),  # as pandas makes them where one lacked
        (["0", "2"], [2.0, 0.0, 2.0], [1, 0, 1]),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_labels_may_be_numbers(ending, labels, given, ids, tmp_path, read):
    rows = [(f"text {number}", label) for number, label in enumerate(given)]
    assert read(task(texts(tmp_path / f"a.{ending}", rows), labels))["label"][:] == ids


@pytest.mark.parametrize(
    ("ending", "label"),
    [
        *product(["jsonl", "csv", "parquet"], [None, -1, "no column"]),
        ("csv", ""),  # elsewhere an empty name is a wrong one
    ],
)
def test_a_split_without_labels_has_label_minus_one(ending, label, tmp_path, read):
    if label == "no column":
        path = texts(tmp_path / f"a.{ending}", [("a",), ("b",)], ("text",))
    else:
        path = texts(tmp_path / f"a.{ending}", [("a", label), ("b", label)])
    without_labels = task(path, ["x", "y"])
    assert read(without_labels)["label"][:] == [-1, -1]
    with pytest.raises(UserError, match="label"):
        read(without_labels, need_labels=True)


def test_parquet_of_datasets_keeps_its_class_names(tmp_path, read):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    data.to_parquet(tmp_path / "train.parquet")
    assert open_source(task(tmp_path), tmp_path / "cache").labels == ["no", "yes"]
    assert read(task(tmp_path))["label"][:] == [0, 1]
    assert read(task(tmp_path, ["yes", "no"]))["label"][:] == [1, 0]  # by name, not by id


def test_categories_and_wide_strings_of_parquet_are_text(tmp_path, read):
    wide = pa.array(["a", "b"], pa.large_string())
    table = pa.table({"text": wide, "label": pa.array(["x", "y"]).dictionary_encode()})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(task(tmp_path / "a.parquet"))["label"][:] == [0, 1]


LOOKS = ["2020-01-01", "1", "true", "null", "", "NaN", "a\nb", '"', "\u2028", "😀"]
QUOTES = ['"open', 'closed"', '"both"', 'in "the" middle', "a,b", '""', "'", "\u2028"]


@pytest.mark.parametrize(
    ("ending", "given"),
    [("jsonl", LOOKS), ("csv", LOOKS), ("parquet", LOOKS), ("tsv", QUOTES), ("csv", ["same"] * 3)],
)
def test_texts_stay_as_they_are(ending, given, tmp_path, read):
    """Also those that look like something else, and exact duplicates."""
    path = texts(tmp_path / f"a.{ending}", [(text, "x") for text in given])
    data = read(task(path, ["x", "y"]))
    assert data["text"][:] == given
    assert len(set(data["key_hi"][:])) == len(set(given))


def test_lines_may_be_blank_or_long_or_end_like_windows(tmp_path, read):
    long = "word " * 40_000
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a", "label": "x"}\r\n\r\n  \n'
        + json.dumps({"text": long, "label": "y", "other": [{"deep": 1}]}).encode()
    )
    assert read(task(path))["text"][:] == ["a", long]


@pytest.mark.parametrize("top", ["sep=;\r\n", "\ufeffsep=;\n"])
def test_a_line_for_excel_names_what_separates(top, tmp_path, read):
    """Commas in the header would be taken for it."""
    (tmp_path / "a.csv").write_text(top + "text;label;a,b\nso, so;x;1\nbad;y;2\n")
    assert read(task(tmp_path / "a.csv"))["text"][:] == ["so, so", "bad"]
    (tmp_path / "a.csv").write_text(top + "text;label\na;b;c\n")
    with pytest.raises(UserError, match=r"a\.csv:3: the row has 3 values"):
        read(task(tmp_path / "a.csv"))


def test_many_batches_keep_the_order_and_a_bad_row_among_them_is_found(tmp_path, read):
    rows = [(f"text {number} {'pad ' * 400}", number % 7) for number in range(12_000)]
    path = texts(tmp_path / "a.jsonl", rows)
    data = read(task(path, list("abcdefg")))
    assert data.data.nbytes > 2**24  # more than one of the reader's blocks
    assert data["label"][:] == [label for _, label in rows]
    with path.open("a") as file:
        file.write('{"text": "last", "label": "jox"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:12001:.*'jox'"):
        read(task(path, list("abcdefg")))


row_strategy = st.tuples(st.text(any_letter), st.sampled_from("xyz"))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(row_strategy, min_size=1),
    ending=st.sampled_from(["jsonl", "csv", "tsv", "parquet"]),
)
def test_rows_are_read_as_they_were_written(rows, ending, tmp_path_factory):
    if ending == "tsv":  # which cannot hold them
        rows = [(re.sub("[\t\r\n]", " ", text), label) for text, label in rows]
    folder = tmp_path_factory.mktemp("rows")
    data = open_source(task(texts(folder / f"a.{ending}", rows), list("xyz")), folder).read("train")
    read = zip(data["text"][:], data["label"][:], strict=True)
    assert list(read) == [(text, "xyz".index(label)) for text, label in rows]


def test_several_csv_files_are_open_at_once(tmp_path):
    """The end of one set the longest field of all back to 128 KiB."""
    long = "a" * 200_000
    files = [texts(tmp_path / f"{name}.csv", [("b", "x"), (long, "y")]) for name in "ab"]
    first, second = (open_file(file).rows(["text"]) for file in files)
    next(first)
    list(second)
    assert next(first)[1]["text"] == long


# -------------------------------------------------------------------------------- per class


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_the_cap_does_not_depend_on_the_order(rows, count, random):
    def kept(rows, count):
        classes = np.array([label for label, _ in rows])
        positions = keep_per_class(classes, content_keys([t for _, t in rows]), count)
        assert (np.diff(positions) > 0).all()
        return [rows[position] for position in positions]

    chosen = kept(rows, count)
    shuffled = random.sample(rows, len(rows))
    assert sorted(kept(shuffled, count)) == sorted(chosen)
    for label in range(4):
        there = sum(label == other for other, _ in rows)
        assert sum(label == other for other, _ in chosen) == min(there, count)
    assert set(kept(rows, 1)) <= set(chosen)


def test_the_cap_is_applied_to_its_split_alone(tmp_path, read):
    rows = [(f"text {number}", "xxy"[number % 3]) for number in range(30)]
    texts(tmp_path / "train.jsonl", rows)
    texts(tmp_path / "test.jsonl", rows)
    capped = task(tmp_path, per_class={"train": 4})
    assert sorted(read(capped)["label"][:]) == [0] * 4 + [1] * 4
    assert len(read(capped, "test")) == 30


# ------------------------------------------------------------------- files that are not taken


@pytest.mark.parametrize(
    ("name", "encoding", "start"),
    [
        ("a.csv", "windows-1252", b""),
        ("a.tsv.gz", "utf-16-le", b"\xff\xfe"),
        ("a.jsonl", "utf-16-be", b"\xfe\xff"),
        ("a.txt", "windows-1252", b""),
    ],
)
def test_the_advice_for_other_encodings_keeps_every_character(name, encoding, start, tmp_path):
    text = "\u201eZ\u00fcrich\u201c \u2013 5 \u20ac,joy\n"
    content = start + text.encode(encoding)
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(UserError, match=rf"{name}:1: not UTF-8: byte 0x") as refusal:
        list(open_file(tmp_path / name).rows([]))
    advised = re.search(r"`iconv -f (\S+) -t utf-8`", str(refusal.value))
    assert content.decode(advised[1]) == text


ODD = {"huggingface": json.dumps({"info": {"features": {"label": {"_type": "Sys", "a": []}}}})}


@pytest.mark.parametrize(
    ("columns", "metadata", "says"),
    [
        ([["a", "b"], ["joy", "joy"], ["c", "d"]], None, "has column 'text' twice"),
        ([["a", "b"], [0, 1]], ODD, "its metadata of Hugging Face"),
    ],
)
def test_odd_parquet_is_refused(columns, metadata, says, tmp_path, read):
    table = pa.table(columns, ["text", "label", "text"][: len(columns)])
    pa.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    names = MOODS if metadata is None else None  # which the metadata may name
    with pytest.raises(UserError, match=rf"a\.parquet: .*{says}"):
        read(task(tmp_path / "a.parquet", names))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_pipe_is_no_data_file(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is no regular file"):
        open_file(tmp_path / name)


@pytest.mark.parametrize("path", ["missing.csv", "csv", "docstring:torch", "./a", "a/b/c", "~/a"])
def test_what_cannot_be_on_the_hub_is_not_asked_for(path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(UserError, match="no such file or folder"):
        open_source(task(path))


# ------------------------------------------------------------------------------------- cache


def test_no_space_leaves_nothing_behind(tmp_path):
    def fails(path):
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        build_once(tmp_path / "cache" / "a.arrow", fails)
    assert [path.name for path in (tmp_path / "cache").iterdir()] in ([], ["a.arrow.lock"])


def test_of_several_writers_one_writes(tmp_path):
    written = []

    def slow(path):
        written.append(path)
        time.sleep(0.2)
        path.write_text("whole")

    target = tmp_path / "a.arrow"
    threads = [threading.Thread(target=build_once, args=(target, slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and target.read_text() == "whole"


def test_a_file_is_converted_again_only_where_it_or_the_labels_changed(tmp_path, read, monkeypatch):
    path = texts(tmp_path / "a.jsonl")
    first = read(task(path))
    with monkeypatch.context() as patch:
        patch.setattr("ds_distill.data.row_forms.TextRows.begin", None)
        again = read(task(path))
    assert again._fingerprint == first._fingerprint  # so `map` finds its own cache too
    assert first.cache_files[0]["filename"].startswith(str(tmp_path / "cache"))
    assert read(task(path, MOODS))["label"][0] == 1
    assert read(task(path, MOODS[::-1]))["label"][0] == 0
    texts(path, [("new", "anger")])
    assert read(task(path, MOODS))["text"][:] == ["new"]


# --------------------------------------------------------------------------------------- hub


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, `org/moods`, without the network."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["joy", "anger"])}
    )

    def split(labels):
        texts = [f"text {number}" for number in range(len(labels))]
        return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)

    def load_dataset(path, config, cache_dir):
        if (path, config) != ("org/moods", "english"):
            raise ConnectionError(f"Couldn't reach {path!r} on the Hub")
        labels = {"train": [0, 1, 1], "valid": [1, 0], "test": [-1, -1]}
        return datasets.DatasetDict({name: split(ids) for name, ids in labels.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_a_hub_data_set_has_its_own_label_names_and_splits(hub, tmp_path):
    def opened(labels=None, **data):
        return open_source(task("org/moods", labels, config="english", **data), tmp_path)

    source = opened()
    assert source.splits == ["train", "validation", "test"]
    assert source.labels == ["joy", "anger"]
    assert source.read("train")["label"][:] == [0, 1, 1]
    assert source.read("test")["label"][:] == [-1, -1]
    assert opened(MOODS).read("validation")["label"][:] == [0, 1]
    assert opened(splits={"test": "valid"}).splits == ["test"]
    with pytest.raises(UserError, match=r"org/moods, split train, row 2: label 1 \('anger'\)"):
        opened(["joy", "fury"]).read("train")
    with pytest.raises(UserError, match=r"task.data.splits.test=vald.*`valid`"):
        opened(splits={"test": "vald"})
    with pytest.raises(UserError, match=r"no local file or folder.*org/mods could not be loaded"):
        open_source(task("org/mods"), tmp_path)
