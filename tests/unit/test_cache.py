"""The cache is never silently wrong."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.cache.build import (
    Plan,
    ShardWriter,
    blocks_to_write,
    building,
    finish_build,
    start_build,
)
from ds_distill.cache.format import check_fingerprint, weights_fingerprint
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.words import Words
from ds_distill.data.keys import content_keys
from ds_distill.errors import UserError
from ds_distill.types import Signals

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
    write_cache(path, keys, logits)
    return path, keys, logits


def write_cache(path, keys, logits, dtype="float32", block_rows=8, ranks=1):
    """Write all teachers' logits at once, by so many ranks in turn."""
    plan = Plan(0, block_rows, [keys])
    teachers = {
        name: (PRINT, Words(dtype=dtype, classes=values.shape[1]))
        for name, values in logits.items()
    }
    with building(path):
        start_build(path, plan, teachers)
        for name, (_, words) in teachers.items():
            writers = [ShardWriter(path, plan, name, words, rank, ranks) for rank in range(ranks)]
            for at in blocks_to_write(path, plan, name, words):
                _, part = plan.blocks[at]
                kept = words.keep(Signals(torch.from_numpy(logits[name][part])))
                rows = part.stop - part.start
                writers[at % ranks].append(at, words.record_batch([kept]), rows)
            for writer in writers:
                writer.close()
        finish_build(path, plan, teachers)


def read(path, teacher, keys):
    reader = CacheReader(path)
    return reader.read(teacher, reader.rows(torch.from_numpy(keys))).logits.numpy()


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    block_rows=st.sampled_from([1, 2, 8, 64]),
    ranks=st.integers(1, 3),
    data=st.data(),
)
def test_any_subset_in_any_order_reads_what_was_written(
    tmp_path_factory, count, dtype, block_rows, ranks, data
):
    path = tmp_path_factory.mktemp("round-trip") / "cache"
    keys, logits = make_keys(count), {"t": make_logits(count), "u": make_logits(count, 1)}
    write_cache(path, keys, logits, dtype, block_rows, ranks)
    asked = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1)))
    for teacher, values in logits.items():
        wanted = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(read(path, teacher, keys[asked]), wanted[asked])
    assert CacheReader(path).teachers == ["t", "u"]


def test_keys_that_share_their_first_word_are_told_apart(tmp_path):
    low, high = -(2**63), 2**63 - 1
    keys = np.array([[7, 5], [7, -5], [7, 0], [low, high], [high, low], [high, high], [low, low]])
    logits = make_logits(len(keys))
    write_cache(tmp_path / "cache", keys, {"t": logits})
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
    path, _, logits = cache
    [file] = (path / "first").iterdir()
    shard = datasets.Dataset.from_file(str(file))
    np.testing.assert_array_equal(np.array(shard["logits"]), logits["first"])


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
