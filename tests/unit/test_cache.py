"""The cache is never silently wrong."""

import json
import os
import signal
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.cache import writer
from ds_distill.cache.format import check_fingerprint, manifest_checksum, weights_fingerprint
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.writer import write_cache
from ds_distill.data.keys import content_keys
from ds_distill.errors import UserError

PRINT = {"weights": "w1", "tokenizer": "t1", "max_length": 128, "labels": ["a", "b"]}
CLASSES = 3


def make_keys(count, mark=""):
    return content_keys([f"text {mark}{number}" for number in range(count)])


def make_logits(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, CLASSES)).astype(np.float32) * 5


@pytest.fixture
def cache(tmp_path):
    """Two teachers on 50 examples, float32."""
    keys = make_keys(50)
    logits = {"first": make_logits(50, 1), "second": make_logits(50, 2)}
    path = tmp_path / "cache"
    write_cache(path, keys, logits, dict.fromkeys(logits, PRINT), "float32")
    return path, keys, logits


def read(path, teacher, keys):
    reader = CacheReader(path)
    return reader.logits(teacher, reader.rows(torch.from_numpy(keys))).numpy()


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "float16"]),
    batch_rows=st.integers(1, 50),
    data=st.data(),
)
def test_any_subset_in_any_order_reads_what_was_written(
    tmp_path_factory, count, dtype, batch_rows, data
):
    path = tmp_path_factory.mktemp("round-trip") / "cache"
    keys, logits = make_keys(count), {"t": make_logits(count), "u": make_logits(count, 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BATCH_ROWS", batch_rows)
        assert write_cache(path, keys, logits, dict.fromkeys(logits, PRINT), dtype) == count
    asked = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1)))
    for teacher, values in logits.items():
        wanted = values.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(read(path, teacher, keys[asked]), wanted[asked])
    assert CacheReader(path).teachers == ["t", "u"]


def test_examples_with_the_same_key_share_a_row(tmp_path):
    keys = make_keys(4)[[0, 1, 0, 2, 1, 3]]
    logits = make_logits(4)[[0, 1, 0, 2, 1, 3]]
    assert write_cache(tmp_path / "cache", keys, {"t": logits}, {"t": PRINT}, "float32") == 4
    np.testing.assert_array_equal(read(tmp_path / "cache", "t", keys), logits)


def test_keys_that_share_their_first_word_are_told_apart(tmp_path):
    low, high = -(2**63), 2**63 - 1
    keys = np.array([[7, 5], [7, -5], [7, 0], [low, high], [high, low], [high, high], [low, low]])
    logits = make_logits(len(keys))
    write_cache(tmp_path / "cache", keys, {"t": logits}, {"t": PRINT}, "float32")
    order = [6, 0, 3, 2, 5, 1, 4]
    np.testing.assert_array_equal(read(tmp_path / "cache", "t", keys[order]), logits[order])
    for missing in ([7, 1], [7, 6], [high, 0], [0, 0], [high - 1, high], [low, 0]):
        with pytest.raises(UserError, match="1 of 1 examples"):
            read(tmp_path / "cache", "t", np.array([missing]))


def test_a_missing_key_is_an_error_with_counts_and_an_example(cache):
    path, keys, _ = cache
    strange = make_keys(2, "strange ")
    asked = np.concatenate([keys[:3], strange, keys[4:5]])
    with pytest.raises(UserError, match="2 of 6 examples") as caught:
        read(path, "first", asked)
    assert str(strange[0].tolist()) in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_are_arrow_streams_that_other_tools_open(cache):
    path, keys, logits = cache
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    shard = datasets.Dataset.from_file(str(path / "first" / "shard-00000.arrow"))
    np.testing.assert_array_equal(np.array(shard["logits"]), logits["first"][order])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["rows"] == len(shard) == 50
    assert manifest["teachers"]["first"]["fingerprint"] == PRINT


# ------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("what", "value"),
    [("weights", "w2"), ("tokenizer", "t2"), ("max_length", 64), ("labels", ["b", "a"]),
     ("dtype", "bfloat16")],
)  # fmt: skip
def test_a_changed_fingerprint_is_refused_with_both_values(cache, what, value):
    reader = CacheReader(cache[0])
    reader.check("first", PRINT)
    with pytest.raises(UserError) as caught:
        reader.check("first", {**PRINT, what: value})
    for part in (what, repr(value), repr(PRINT.get(what)), "'first'"):
        assert part in str(caught.value)


def test_another_teacher_is_refused(cache):
    with pytest.raises(UserError, match=r"no teacher 'third', only first, second"):
        CacheReader(cache[0]).check("third", PRINT)


def test_a_flipped_bit_is_refused_in_any_file(cache):
    path, keys, _ = cache
    draw = np.random.default_rng(0)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert [file.name for file in files] == [
        *("shard-00000.arrow", "index.npy", "manifest.json", "shard-00000.arrow")
    ]
    for file in files:
        whole = file.read_bytes()
        for position in draw.choice(len(whole), 60, replace=False):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << int(draw.integers(8))
            file.write_bytes(damaged)
            if file.suffix == ".json" and _same_json(bytes(damaged), whole):
                continue  # white space
            with pytest.raises(UserError, match=r"damaged|format"):
                [read(path, teacher, keys) for teacher in ("first", "second")]
        file.write_bytes(whole)
    read(path, "first", keys)


def _same_json(one, other):
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["index.npy", "manifest.json", "first/shard-00000.arrow"])
def test_a_cut_or_missing_file_is_refused(cache, name):
    path, keys, _ = cache
    file = path / name
    for end in (file.stat().st_size - 2, 10, 0):  # a manifest ends in a line feed
        os.truncate(file, end)
        with pytest.raises(UserError, match="damaged"):
            read(path, "first", keys)
    file.unlink()
    with pytest.raises(UserError, match=r"damaged|never finished"):
        read(path, "first", keys)


def test_another_format_version_is_refused_with_both_numbers(cache):
    path = cache[0]
    manifest = json.loads((path / "manifest.json").read_text())
    for version in (2, None):
        changed = {**manifest, "format": version}
        changed["checksum"] = manifest_checksum(changed)
        (path / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=rf"format {version}, .* format 1"):
            CacheReader(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(tmp_path, value):
    logits = make_logits(9)
    logits[4, 1] = value
    with pytest.raises(UserError, match=r"'t'.*1 of 9 examples.*weights are damaged") as caught:
        write_cache(tmp_path / "cache", make_keys(9), {"t": logits}, {"t": PRINT}, "float32")
    assert str(make_keys(9)[4].tolist()) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
def test_logits_too_large_for_float16_are_refused(tmp_path):
    logits = make_logits(9)
    logits[2, 0] = 7e4
    with pytest.raises(UserError, match=r"float16 for 1 of 9 .*dtype to float32"):
        write_cache(tmp_path / "cache", make_keys(9), {"t": logits}, {"t": PRINT}, "float16")
    assert list(tmp_path.iterdir()) == []
    write_cache(tmp_path / "cache", make_keys(9), {"t": logits}, {"t": PRINT}, "float32")


@pytest.mark.parametrize("step", ["shard", "manifest", "rename"])
def test_killed_before_its_end_there_is_no_cache(tmp_path, monkeypatch, step):
    path, keys, logits = tmp_path / "cache", make_keys(9), {"t": make_logits(9)}
    child = os.fork()
    if child == 0:
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        target = {"shard": "file_checksum", "manifest": "write_json"}
        if step == "rename":
            monkeypatch.setattr(os, "rename", kill)
        else:
            monkeypatch.setattr(writer, target[step], kill)
        write_cache(path, keys, logits, {"t": PRINT}, "float32")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not path.exists()
    with pytest.raises(UserError, match="never finished"):
        CacheReader(path)
    write_cache(path, keys, logits, {"t": PRINT}, "float32")
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    np.testing.assert_array_equal(read(path, "t", keys), logits["t"])


def test_the_same_words_are_the_same_bytes(tmp_path):
    keys, logits = make_keys(30), make_logits(30)
    order = np.random.default_rng(0).permutation(30)
    write_cache(tmp_path / "one", keys, {"t": logits}, {"t": PRINT}, "float16")
    write_cache(tmp_path / "two", keys[order], {"t": logits[order]}, {"t": PRINT}, "float16")
    for file in (tmp_path / "one").rglob("*.*"):
        other = tmp_path / "two" / file.relative_to(tmp_path / "one")
        assert file.read_bytes() == other.read_bytes()


# ----------------------------------------------------------------- fingerprint of weights


def test_the_fingerprint_of_a_folder_is_its_weights_and_config(tmp_path):
    def make(name, weights=b"weights", config="{}", **others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text(config)
        for other, text in others.items():
            (tmp_path / name / other).write_text(text)
        return weights_fingerprint(str(tmp_path / name), None)

    same = make("one")
    assert make("moved", readme="other files do not matter") == same
    assert make("weights", weights=b"Weights") != same
    assert make("config", config='{"a": 1}') != same
    assert weights_fingerprint("org/name", "abc") == "org/name@abc"


def test_what_is_asked_for_must_have_been_written():
    check_fingerprint(Path("cache"), "t", {**PRINT, "more": 1}, PRINT)
    with pytest.raises(UserError, match="None"):
        check_fingerprint(Path("cache"), "t", {}, PRINT)
