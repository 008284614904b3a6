"""Data sources: every format, every mistake in it, and the cap per class."""

import csv
import errno
import gzip
import json
import os
import re
import threading
import time
from itertools import product
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.data import examples, labels
from ds_distill.data.built import build_once
from ds_distill.data.open_source import open_source
from ds_distill.data.readers import open_file, tables
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import Columns, Data, SingleLabel, Task

ROWS = [("good day", "joy"), ("bad day", "anger"), ("so, so", "joy"), ("läuft", "anger")]
SHARED = Path(
    os.environ.get("DS_DISTILL_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")
)


def task(path: Path | str, labels: list[str] | None = None, **data) -> Task:
    return SingleLabel(data=Data(path=str(path), **data), labels=labels)


def write(path: Path, rows=ROWS, names=("text", "label")) -> Path:
    """Rows as a file of the kind that its name says."""
    if path.name.endswith(".parquet"):
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        pa.parquet.write_table(pa.table(columns), path)
        return path
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        if ".csv" in path.name:
            csv.writer(file).writerows([names, *rows])
        elif ".tsv" in path.name:
            file.writelines("\t".join(map(str, row)) + "\n" for row in [names, *rows])
        else:
            for row in rows:
                file.write(json.dumps(dict(zip(names, row, strict=True))) + "\n")
    return path


@pytest.fixture
def read(tmp_path):
    """Read a split of a task with a cache of its own."""

    def read(task: Task, split: str = "train", **options) -> datasets.Dataset:
        return open_source(task, tmp_path / "cache").read(split, **options)

    return read


# -------------------------------------------------------------------------------- good input

ENDINGS = ("jsonl", "jsonl.gz", "json", "json.gz", "csv", "csv.gz", "tsv", "tsv.gz", "parquet")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_of_each_kind_gives_the_same_examples(ending, tmp_path, read):
    data = read(task(write(tmp_path / f"mine.{ending}")))
    assert data.features["label"].dtype == data.features["key_hi"].dtype == "int64"
    assert data.column_names == ["text", "label", "key_hi", "key_lo", "copy", "group"]
    assert data["text"][:] == [text for text, _ in ROWS]
    assert data["label"][:] == [1, 0, 1, 0]  # sorted names: anger, joy
    keys = content_keys([text for text, _ in ROWS])
    np.testing.assert_array_equal(np.stack([data["key_hi"], data["key_lo"]], axis=1), keys)


@pytest.mark.parametrize("ending", ENDINGS)
def test_pairs_have_two_texts_and_other_keys(ending, tmp_path, read):
    rows = [("a", "b", "x", 1), ("ab", "", "y", 2)]
    path = write(tmp_path / f"pairs.{ending}", rows, ("question", "answer", "verdict", "number"))
    columns = Columns(text="question", text_b="answer", label="verdict")
    data = read(task(path, columns=columns))
    assert data.column_names == ["text", "text_b", "label", "key_hi", "key_lo", "copy", "group"]
    assert data["text_b"][:] == ["b", ""]
    np.testing.assert_array_equal(data["key_lo"], content_keys(["a", "ab"], ["b", ""])[:, 1])


@pytest.mark.parametrize(("labels", "told"), [(["1", "2"], False), (["no", "yes"], True)])
def test_class_ids_are_told_where_they_are_taken(labels, told, tmp_path):
    """Where the names are numbers, 0 is none of them, and no class id either."""
    write(tmp_path / "train.jsonl", [("a", 1), ("b", 7)])
    with pytest.raises(UserError, match="label 7") as error:
        open_source(task(tmp_path, labels), tmp_path / "cache").read("train")
    assert ("Class ids go from 0 to 1." in str(error.value)) == told


def test_endings_may_be_capitals(tmp_path):
    """They were read as they stand, and called another encoding."""
    (tmp_path / "train.CSV.GZ").write_bytes(gzip.compress(b"text,label\na,b\nc,d\n"))
    data = open_source(task(tmp_path), tmp_path / "cache").read("train")
    assert data["text"][:] == ["a", "c"]


def test_the_splits_of_a_folder_are_found_by_their_names(tmp_path):
    for name in ("test.csv", "dev.jsonl.gz", "extra.json", "train.parquet"):
        write(tmp_path / name)
    (tmp_path / "labels.json").write_text('["joy", "anger"]')
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.csv").write_text("not data")
    source = open_source(task(tmp_path), tmp_path / "cache")
    assert source.splits == ["train", "validation", "test", "extra"]
    assert source.labels == ["joy", "anger"]
    assert all(source.read(split)["label"][:] == [0, 1, 0, 1] for split in source.splits)


def test_splits_may_be_named_by_file_or_stem(tmp_path):
    for name in ("own_train.jsonl", "dev.jsonl", "val.jsonl"):
        write(tmp_path / name)
    splits = {"train": "own_train", "validation": "dev.jsonl"}
    assert open_source(task(tmp_path, splits=splits), tmp_path / "cache").splits == list(splits)


@pytest.mark.parametrize(
    ("labels", "given", "ids"),
    [
        (["anger", "joy"], [1, 0, 1], [1, 0, 1]),  # class ids
        (["1", "0"], [1, 0, 1], [0, 1, 0]),  # names that are numbers
        (["-1", "0", "1"], [-1, 0, 1], [0, 1, 2]),
        (None, [10, 9, 10], [1, 0, 1]),  # sorted as numbers
        (None, ["10", "9", "10"], [1, 0, 1]),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_labels_may_be_numbers(ending, labels, given, ids, tmp_path, read):
    rows = [(f"text {number}", label) for number, label in enumerate(given)]
    assert read(task(write(tmp_path / f"a.{ending}", rows), labels))["label"][:] == ids


@pytest.mark.parametrize("labels", [None, ["0", "2"]])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_whole_numbers_may_be_floats(ending, labels, tmp_path, read):
    """As pandas makes them of a column in which one lacked: `init` called them whole numbers, and
    a run refused them."""
    rows = [("a", 2.0), ("b", 0.0), ("c", 2.0)]
    given = task(write(tmp_path / f"a.{ending}", rows), labels)
    assert open_source(given, tmp_path / "cache").labels == ["0", "2"]
    assert read(given)["label"][:] == [1, 0, 1]
    half = task(write(tmp_path / f"b.{ending}", [*rows, ("d", 0.5)]), labels)
    with pytest.raises(UserError, match=r"got the number 0\.5.*task\.type=regression"):
        read(half)


@pytest.mark.parametrize(
    ("ending", "label"),
    [
        *product(["jsonl", "csv", "parquet"], [None, -1, "no column"]),
        ("csv", ""),  # elsewhere an empty name is a wrong one
    ],
)
def test_a_split_without_labels_has_label_minus_one(ending, label, tmp_path, read):
    if label == "no column":
        path = write(tmp_path / f"a.{ending}", [("a",), ("b",)], ("text",))
    else:
        path = write(tmp_path / f"a.{ending}", [("a", label), ("b", label)])
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
    table = pa.table(
        {
            "text": pa.array(["a", "b"], pa.large_string()),
            "label": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(task(tmp_path / "a.parquet"))["label"][:] == [0, 1]


def test_texts_that_look_like_something_else_stay_text(tmp_path, read):
    texts = ["2020-01-01", "1", "true", "null", "", "NaN", "a\nb", '"', "\u2028", "😀"]
    for ending in ("jsonl", "csv", "parquet"):
        path = write(tmp_path / f"a.{ending}", [(text, "x") for text in texts])
        assert read(task(path, ["x", "y"]))["text"][:] == texts


def test_quotes_in_tab_separated_values_are_letters(tmp_path, read):
    texts = ['"open', 'closed"', '"both"', 'in "the" middle', "a,b", '""', "'", "\u2028"]
    path = write(tmp_path / "a.tsv", [(text, "x") for text in texts])
    assert read(task(path, ["x", "y"]))["text"][:] == texts


def test_lines_may_be_blank_or_long_or_end_like_windows(tmp_path, read):
    long = "word " * 40_000
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a", "label": "x"}\r\n\r\n  \n'
        + json.dumps({"text": long, "label": "y", "other": [{"deep": 1}]}).encode()
    )
    assert read(task(path))["text"][:] == ["a", long]


def test_exact_duplicates_stay(tmp_path, read):
    data = read(task(write(tmp_path / "a.csv", [("same", "x")] * 3), ["x", "y"]))
    assert len(data) == 3 and len(set(data["key_hi"][:])) == 1


def test_many_batches_keep_the_order(tmp_path, read):
    rows = [(f"text {number} {'pad ' * 200}", number % 7) for number in range(25_000)]
    data = read(task(write(tmp_path / "a.jsonl", rows), list("abcdefg")))
    assert data.data.nbytes > 2**24  # more than one of the reader's blocks
    assert data["label"][:] == [label for _, label in rows]


row_strategy = st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from("xyz"))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(row_strategy, min_size=1),
    ending=st.sampled_from(["jsonl", "csv", "tsv", "parquet"]),
)
def test_the_fast_and_the_exact_way_agree(rows, ending, tmp_path_factory):
    if ending == "tsv":  # which cannot hold them
        rows = [(re.sub("[\t\r\n]", " ", text), label) for text, label in rows]
    reader = open_file(write(tmp_path_factory.mktemp("rows") / f"a.{ending}", rows))
    ids = labels.LabelIds(["x", "y", "z"], reader, "label")
    ways = [
        [
            (text, label)
            for texts, classes in batches(reader, ["text"], "label", ids)
            for text, label in zip(texts[0].to_pylist(), classes, strict=True)
        ]
        for batches in (examples._fast_batches, examples._exact_batches)
    ]
    assert ways[0] == ways[1] == [(text, "xyz".index(label)) for text, label in rows]


# -------------------------------------------------------------------------------- per class


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_the_cap_does_not_depend_on_the_order(rows, count, random):
    def kept(rows: list, count: int) -> list:
        classes = np.array([label for label, _ in rows])
        positions = examples.keep_per_class(classes, content_keys([t for _, t in rows]), count)
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
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows)
    capped = task(tmp_path, per_class={"train": 4})
    assert sorted(read(capped)["label"][:]) == [0] * 4 + [1] * 4
    assert len(read(capped, "test")) == 30


# --------------------------------------------------------------------------------- bad input

GOOD = b'{"text": "a", "label": "joy"}\n'
BAD_FILES = {
    # name of the case: (file's name, content, what the message must hold)
    "empty": ("a.jsonl", b"", ["a.jsonl", "empty"]),
    "blank": ("a.jsonl", b"\n \n", ["a.jsonl", "no rows"]),
    "empty gzip": ("a.csv.gz", gzip.compress(b""), ["a.csv.gz", "no rows"]),
    "header only": ("a.csv", b"text,label\n", ["a.csv", "no rows"]),
    "broken line": ("a.jsonl", GOOD * 3 + b'{"text": "b", \n', ["a.jsonl:4:", "not readable"]),
    "broken first line": ("a.jsonl", b"text: a\n", ["a.jsonl:1:", "not readable"]),
    "cut off": ("a.jsonl", GOOD + b'{"text": "b", "lab', ["a.jsonl:2:", "not readable"]),
    "line after blanks": ("a.jsonl", GOOD + b"\n\n{]\n", ["a.jsonl:4:"]),
    "array": ("a.json", b"[\n" + GOOD + b"]\n", ["a.json:1:", "array", "one object per line"]),
    "number as row": ("a.jsonl", GOOD + b"7\n", ["a.jsonl:2:", "the number 7", "not an object"]),
    "nested too deep": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", ["a.jsonl:2:"]),
    "key twice": ("a.jsonl", GOOD + b'{"text": "a", "text": "b"}\n', ["a.jsonl:2:", "'text'"]),
    "no column": ("a.jsonl", b'{"txt": "a", "label": "joy"}\n', ["'text'", "`txt`", "txt, label"]),
    "no key": ("a.jsonl", GOOD + b'{"tekst": "b"}\n', ["a.jsonl:2:", "no 'text'", "'tekst'"]),
    "null text": ("a.jsonl", GOOD + b'{"text": null, "label": "joy"}\n', ["a.jsonl:2:", "null"]),
    "number as text": ("a.jsonl", GOOD + b'{"text": 3, "label": "joy"}\n', ["a.jsonl:2:", "3"]),
    "list as text": ("a.jsonl", b'{"text": ["a"], "label": "joy"}\n', ["a.jsonl:1:", "a list"]),
    "half a surrogate": ("a.jsonl", b'{"text": "\\ud800", "label": "joy"}\n', ["a.jsonl:1:"]),
    "latin1": ("a.jsonl", GOOD + b'{"text": "\xe4", "label": "joy"}\n', ["a.jsonl:2:", "UTF-8"]),
    "latin1 csv": ("a.csv", b"text,label\n\xe4,joy\n", ["a.csv:2:", "UTF-8", "0xe4"]),
    "utf-16": ("a.csv", "text,label\na,joy\n".encode("utf-16"), ["a.csv:1:", "UTF-8"]),
    "label": ("a.jsonl", GOOD + b'{"text": "b", "label": "angr"}\n', ["a.jsonl:2:", "`anger`"]),
    "class id": ("a.jsonl", b'{"text": "b", "label": 2}\n', ["a.jsonl:1:", "label 2", "0 to 1"]),
    "bool label": ("a.jsonl", b'{"text": "b", "label": true}\n', ["a.jsonl:1:", "true"]),
    "float label": ("a.jsonl", b'{"text": "b", "label": 1.5}\n', ["a.jsonl:1:", "1.5"]),
    "labels here and there": ("a.jsonl", GOOD + b'{"text": "b"}\n', ["a.jsonl:2:", "no label"]),
    "label in csv": ("a.csv", b"text,label\na,joy\nb,2\n", ["a.csv:3:", "'2'"]),
    "no label in csv": ("a.csv", b"text,label\na,joy\nb,\n", ["a.csv:3:", "no label"]),
    "csv header": ("a.csv", b"text|label\na|joy\n", ["a.csv", "'text'", "text|label"]),
    "csv column twice": ("a.csv", b"text,label,text\na,joy,b\n", ["a.csv:1:", "twice"]),
    "csv too many": ("a.csv", b"text,label\na, b,joy\n", ["a.csv:2:", "3 values", "quotes"]),
    "csv open quote": ("a.csv", b'text,label\na,joy\n"b,joy\nc,joy\n', ["a.csv:3:", "quote"]),
    "csv after a quote": ("a.csv", b'text,label\n"a"b,joy\n', ["a.csv:2:", "quotes"]),
    "long line": ("a.txt.gz", gzip.compress(b"a" * 2**25), ["a.txt.gz:1:", "16,777,216 bytes"]),
    "long line of JSON": ("a.jsonl.gz", gzip.compress(b"[" * 2**25), ["a.jsonl.gz:1:", "longer"]),
    "long row": ("a.csv", b'text,label\n"' + b"a\n" * 2**23, ["a.csv:2:", "16,777,216 characters"]),
    "tsv tab": ("a.tsv", b"text\tlabel\na\tb\tjoy\n", ["a.tsv:2:", "3 values", "tabs"]),
    "tsv line break": ("a.tsv", b'text\tlabel\n"a\nb"\tjoy\n', ["a.tsv:2:", "1 values", "breaks"]),
    "csv line break": ("a.csv", b'text,label\n"a\nb",joy\nc,sad\n', ["a.csv:4:", "'sad'"]),
    "not gzip": ("a.jsonl.gz", GOOD, ["a.jsonl.gz", "cannot be read"]),
    "gzip cut off": ("a.jsonl.gz", gzip.compress(GOOD * 99)[:-9], ["a.jsonl.gz", "cannot be read"]),
    "not parquet": ("a.parquet", b"PAR1 no", ["a.parquet", "parquet"]),
    "ending": ("a.xlsx", b"a\n", ["a.xlsx", ".jsonl"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_with_the_place(case, tmp_path, read):
    name, content, expected = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refusal:
        read(task(tmp_path / name, ["anger", "joy"]))
    message = str(refusal.value)
    assert all(part in message for part in expected), message
    assert "\n" not in message and len(message) < 700
    whole = re.compile(r".*\.lock|columns-\w+\.json")
    left = [path for path in (tmp_path / "cache").glob("*") if not whole.fullmatch(path.name)]
    assert left == []  # nothing half-written


@pytest.mark.parametrize(
    ("encoding", "start"),
    [("windows-1252", b""), ("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")],
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.jsonl", "a.txt"])
def test_the_advice_for_other_encodings_keeps_every_character(name, encoding, start, tmp_path):
    text = "\u201eZ\u00fcrich\u201c \u2013 5 \u20ac,joy\n"
    content = start + text.encode(encoding)
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(UserError, match=rf"{name}:1: not UTF-8: byte 0x") as refusal:
        list(open_file(tmp_path / name).rows([]))
    advised = re.search(r"`iconv -f (\S+) -t utf-8`", str(refusal.value))
    assert advised is not None and content.decode(advised[1]) == text


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": ["a", None], "label": ["joy", "joy"]}, ["row 2", "null"]),
        ({"text": ["a", "b"], "label": ["joy", "sad"]}, ["row 2", "'sad'"]),
        ({"text": [["a"], ["b"]], "label": ["joy", "joy"]}, ["row 1", "a list"]),
        ({"text": ["a", "b"], "label": [0.0, 1.5]}, ["row 2", "1.5"]),
        ({"tokens": ["a", "b"]}, ["'text'", "tokens"]),
        ({"text": pa.array([], pa.string()), "label": pa.array([], pa.string())}, ["no rows"]),
    ],
)
def test_bad_parquet_is_refused_with_the_row(columns, expected, tmp_path, read):
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError) as refusal:
        read(task(tmp_path / "a.parquet", ["anger", "joy"]))
    assert all(part in str(refusal.value) for part in ["a.parquet", *expected]), refusal.value


def coded(texts: list[str], rows: int) -> pa.Array:
    """Texts by turns, which a parquet file has once each."""
    numbers = pa.array(np.arange(rows) % len(texts), pa.int32())
    return pa.DictionaryArray.from_arrays(numbers, pa.array(texts)).dictionary_decode()


@pytest.mark.parametrize("nested", [False, True])
def test_long_texts_that_repeat_in_parquet_are_read_a_few_at_a_time(nested, tmp_path, monkeypatch):
    """A file of kilobytes, 10,000 rows of which were read at once: 400 MB here."""
    texts = ["a" * 100_000, "b" * 100_000, "c"]
    column = coded(texts, 6_000)
    if nested:
        column = pa.ListArray.from_arrays(pa.array(range(0, 6_001, 2), pa.int32()), column)
    pa.parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=4_000)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    monkeypatch.setattr(tables, "LARGEST", 1 << 26)
    sizes, firsts = [], []
    for table in tables.Parquet(tmp_path / "a.parquet").tables(["text"]):
        sizes.append(table.nbytes)
        flat = table.column("text").combine_chunks()
        firsts += pc.utf8_slice_codeunits(flat.flatten() if nested else flat, 0, 1).to_pylist()
    assert firsts == ["a", "b", "c"] * 2_000
    assert max(sizes) < 1 << 25 and len(sizes) < 60


def test_parquet_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, read):
    pa.parquet.write_table(
        pa.table({"text": coded(["a", "b" * (2**24 + 1)], 10), "label": ["joy"] * 10}),
        tmp_path / "a.parquet",
    )
    with pytest.raises(UserError, match=r"a\.parquet: column 'text' has a text of 16,777,217 "):
        read(task(tmp_path / "a.parquet", ["anger", "joy"]))
    monkeypatch.setattr(tables, "LARGEST", 1 << 20)
    texts = ["a" * 2**21, "b" * 2**20]  # once each, so that there is no code for them
    pa.parquet.write_table(
        pa.table({"text": texts, "label": ["joy"] * 2}),
        tmp_path / "b.parquet",
        compression="zstd",
        use_dictionary=False,
    )
    with pytest.raises(UserError, match=r"b\.parquet: column 'text' holds 3,1\d\d,\d\d\d bytes"):
        read(task(tmp_path / "b.parquet", ["anger", "joy"]))


def test_a_column_twice_and_metadata_that_are_none_are_refused(tmp_path, read):
    table = pa.table([["a", "b"], ["c", "d"], ["joy", "joy"]], ["text", "text", "label"])
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: has column 'text' twice"):
        read(task(tmp_path / "a.parquet", ["anger", "joy"]))
    odd = {"huggingface": json.dumps({"info": {"features": {"label": {"_type": "Sys", "a": []}}}})}
    table = pa.table({"text": ["a", "b"], "label": [0, 1]}).replace_schema_metadata(odd)
    pa.parquet.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: its metadata of Hugging Face"):
        read(task(tmp_path / "b.parquet"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt.gz", "a.parquet"])
def test_a_pipe_is_no_data_file(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is no regular file"):
        open_file(tmp_path / name)


def test_bad_rows_far_into_a_file_are_found(tmp_path, read):
    path = write(tmp_path / "a.jsonl", [(f"text {n}", "joy") for n in range(20_000)])
    with path.open("a") as file:
        file.write('{"text": "last", "label": "jox"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:20001:.*`joy`"):
        read(task(path, ["anger", "joy"]))


FOLDER = {"train.jsonl": GOOD, "val.jsonl": GOOD}
TEST = {"test.jsonl": GOOD}
BAD_TASKS = {
    # name of the case: (files, options of data, labels, what the message must hold)
    "no data": ({"readme.md": b"a"}, {}, None, ["no data file", "readme.md", "train.jsonl"]),
    "two files": ({"val.csv": GOOD, "dev.csv": GOOD}, {}, None, ["validation", "dev.csv, val.csv"]),
    "split's file": (
        FOLDER,
        {"splits": {"train": "trian"}},
        None,
        ["task.data.splits.train=trian", "`train`", "train.jsonl"],
    ),
    "split": (FOLDER, {}, ["joy", "x"], ["'test'", "train, validation", "phases.PHASE.split="]),
    "cap's split": (FOLDER, {"per_class": {"tran": 1}}, None, ["'tran'", "`train`", "per_class"]),
    "config": (FOLDER, {"config": "emotion"}, None, ["task.data.config", "local"]),
    "labels file": ({**TEST, "labels.json": b'["a"]'}, {}, None, ["labels.json", "two or more"]),
    "labels json": ({**TEST, "labels.json": b'["a"'}, {}, None, ["labels.json", "JSON"]),
    "one label": ({**FOLDER, **TEST}, {}, None, ["joy", "at least two"]),
    "labels unknown": (TEST, {}, None, ["'train'", "task.labels"]),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_bad_tasks_are_refused_with_the_key(case, tmp_path, read):
    files, data, labels, expected = BAD_TASKS[case]
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(UserError) as refusal:
        read(task(folder, labels, **data), "test")
    assert all(part in str(refusal.value) for part in expected), refusal.value


def test_one_file_has_no_splits_to_name(tmp_path):
    with pytest.raises(UserError, match=r"task.data.splits.test=a: .* is one file"):
        open_source(task(write(tmp_path / "a.csv"), splits={"test": "a"}))


def test_a_cap_needs_labels(tmp_path, read):
    path = write(tmp_path / "train.jsonl", [("a",), ("b",)], ("text",))
    with pytest.raises(UserError, match="no column 'label'"):
        read(task(path, ["x", "y"], per_class={"train": 1}))


def test_a_path_that_is_not_there_names_the_nearest(tmp_path):
    (tmp_path / "corpus").mkdir()
    with pytest.raises(UserError, match=r"no such file or folder.*corpus`"):
        open_source(task(tmp_path / "corpsu"))


@pytest.mark.parametrize("path", ["missing.csv", "csv", "docstring:torch", "./a", "a/b/c", "~/a"])
def test_what_cannot_be_on_the_hub_is_not_asked_for(path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(UserError, match="no such file or folder"):
        open_source(task(path))


def test_no_space_leaves_nothing_behind(tmp_path):
    def write(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        build_once(tmp_path / "cache" / "a.arrow", write)
    assert [path.name for path in (tmp_path / "cache").iterdir()] in ([], ["a.arrow.lock"])


def test_of_several_writers_one_writes(tmp_path):
    written = []

    def write(path: Path) -> None:
        written.append(path)
        time.sleep(0.2)
        path.write_text("whole")

    target = tmp_path / "a.arrow"
    threads = [threading.Thread(target=build_once, args=(target, write)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and target.read_text() == "whole"


# ------------------------------------------------------------------------------------- cache


def test_a_second_reading_converts_nothing(tmp_path, read, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    first = read(task(path))
    monkeypatch.setattr("ds_distill.data.row_forms.convert", None)
    again = read(task(path))
    assert again._fingerprint == first._fingerprint  # so `map` finds its own cache too
    assert first.cache_files[0]["filename"].startswith(str(tmp_path / "cache"))


def test_a_changed_file_or_label_order_is_converted_again(tmp_path, read):
    path = write(tmp_path / "a.jsonl")
    assert read(task(path, ["anger", "joy"]))["label"][0] == 1
    assert read(task(path, ["joy", "anger"]))["label"][0] == 0
    write(path, [("new", "anger")])
    assert read(task(path, ["anger", "joy"]))["text"][:] == ["new"]


# --------------------------------------------------------------------------------------- hub


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, `org/moods`, without the network."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["joy", "anger"])}
    )

    def split(labels: list[int]) -> datasets.Dataset:
        texts = [f"text {number}" for number in range(len(labels))]
        return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)

    def load_dataset(path, config, cache_dir):
        if (path, config) != ("org/moods", "english"):
            raise ConnectionError(f"Couldn't reach {path!r} on the Hub")
        labels = {"train": [0, 1, 1], "valid": [1, 0], "test": [-1, -1]}
        return datasets.DatasetDict({name: split(ids) for name, ids in labels.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_a_hub_data_set_has_its_own_label_names(hub, tmp_path):
    source = open_source(task("org/moods", config="english"), tmp_path)
    assert source.splits == ["train", "validation", "test"]
    assert source.labels == ["joy", "anger"]
    assert source.read("train")["label"][:] == [0, 1, 1]
    assert source.read("test")["label"][:] == [-1, -1]
    other_order = open_source(task("org/moods", ["anger", "joy"], config="english"), tmp_path)
    assert other_order.read("validation")["label"][:] == [0, 1]


def test_a_hub_label_outside_the_list_is_named(hub, tmp_path):
    source = open_source(task("org/moods", ["joy", "fury"], config="english"), tmp_path)
    with pytest.raises(UserError, match=r"org/moods, split train, row 2: label 1 \('anger'\)"):
        source.read("train")


def test_hub_splits_may_be_named(hub, tmp_path):
    named = task("org/moods", config="english", splits={"test": "valid"})
    assert open_source(named, tmp_path).splits == ["test"]
    with pytest.raises(UserError, match=r"task.data.splits.test=vald.*`valid`"):
        open_source(task("org/moods", config="english", splits={"test": "vald"}), tmp_path)


def test_an_unreachable_hub_is_said_so(hub, tmp_path):
    with pytest.raises(UserError, match=r"no local file or folder.*org/mods could not be loaded"):
        open_source(task("org/mods"), tmp_path)


# --------------------------------------------------------------------------------- real data


@pytest.mark.parametrize(
    ("folder", "columns", "splits", "counts"),
    [
        ("tweeteval_emotion", {}, {}, {"train": 3257, "validation": 374, "test": 1421}),
        ("re_gad_blurb", {}, {}, {"train": 4261, "validation": 535, "test": 534}),
        ("re_ddi", {}, {}, {"train": 25296, "validation": 2496, "test": 5716}),
        (
            "boolq",
            {"text": "text_a", "text_b": "text_b"},
            {"train": "own_train", "validation": "own_val"},
            {"train": 2370, "validation": 300},
        ),
    ],
)
def test_real_data_sets_are_read(folder, columns, splits, counts, tmp_path):
    if not (SHARED / folder).is_dir():
        pytest.skip(f"{SHARED / folder} is not there; set DS_DISTILL_SHARED_DATA")
    source = open_source(
        task(SHARED / folder, columns=Columns(**columns), splits=splits), tmp_path / "cache"
    )
    assert source.labels == json.loads((SHARED / folder / "labels.json").read_text())
    for split, count in counts.items():
        data = source.read(split, need_labels=True)
        assert len(data) == count
        assert set(data["label"][:]) == set(range(len(source.labels)))
