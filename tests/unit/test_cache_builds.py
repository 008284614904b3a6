"""Builds: what one adds, how much room it takes, who may write."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cache_files import PRINT, TWO, block, check_rows, contents, make_keys, write_cache

from ds_distill.cache.build import BUILDING, Plan, ShardWriter, building, start_build
from ds_distill.cache.format import Manifest
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.words import Words
from ds_distill.data.batches import Examples
from ds_distill.errors import UserError
from ds_distill.phases.cache import missing_from


@pytest.fixture
def cache(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Two teachers on 50 examples."""
    path, keys = tmp_path / "cache", make_keys(50)
    write_cache(path, keys, TWO)
    return path, keys


def test_a_superset_adds_what_is_missing_and_touches_nothing_else(cache):
    path, keys = cache
    before = contents(path)
    more = np.concatenate([make_keys(30, "more "), keys])
    write_cache(path, more, TWO, block_rows=64, ranks=2)
    after = contents(path)
    shards = {name for name in before if "shard" in name}
    assert {name: after[name] for name in shards} == {name: before[name] for name in shards}
    assert len([name for name in after if "shard" in name]) == 2 + 2 * 2
    assert len(after) == 6 + 2  # the manifest and one index
    assert CacheReader(path).manifest.examples == 80
    check_rows(path, more, TWO)
    CacheReader(path).verify()
    write_cache(path, more[::-1], TWO)
    assert contents(path) == after


def test_a_subset_and_another_order_add_nothing(cache):
    path, keys = cache
    before = contents(path)
    write_cache(path, keys[::-2], TWO)
    assert contents(path) == before


@pytest.mark.parametrize(
    ("words", "fingerprint", "message"),
    [
        ({"first": TWO["first"]}, PRINT, "holds teacher 'second' too"),
        ({**TWO, "third": TWO["first"]}, PRINT, "no teacher 'third', only first, second"),
        (TWO, {**PRINT, "weights": "w2"}, "weights 'w1', and the run has 'w2'"),
        (
            {**TWO, "first": Words(dtype="float16", classes=3)},
            PRINT,
            "dtype 'float32', and the run has 'float16'",
        ),
        (
            {**TWO, "second": Words(dtype="float16", classes=5)},
            PRINT,
            r"hidden \{-1: 4\}, and the run has \{\}",
        ),
        (
            {**TWO, "first": Words(dtype="float32", classes=3, draws=2)},
            PRINT,
            "draws None, and the run has 2",
        ),
    ],
)
def test_rows_of_others_are_not_added(cache, words, fingerprint, message):
    path, _ = cache
    before = contents(path)
    with pytest.raises(UserError, match=message):
        write_cache(path, make_keys(60), words, fingerprint=fingerprint)
    assert contents(path) == before


def test_rows_are_added_by_the_same_attention_alone(cache):
    path, keys = cache
    write_cache(path.with_name("other"), keys, TWO, fingerprint={**PRINT, "attention": "kernel 1"})
    path = path.with_name("other")
    now = {name: ({**PRINT, "attention": "padded"}, words) for name, words in TWO.items()}

    def split(keys: np.ndarray) -> Any:
        collate = SimpleNamespace(lengths=np.full(len(keys), 7))
        return Examples(torch.from_numpy(keys), np.zeros(len(keys), dtype=np.int64)), collate

    plan, _ = missing_from(path, [split(keys[::2])], now)
    assert plan.examples == 0
    with pytest.raises(UserError, match="with attention 'kernel 1', and the run has 'padded'"):
        missing_from(path, [split(make_keys(51))], now)
    same = {name: ({**PRINT, "attention": "kernel 1"}, words) for name, words in TWO.items()}
    assert missing_from(path, [split(make_keys(51))], same)[0].examples == 1


def test_class_logits_cost_two_bytes_each_and_at_most_24_more(tmp_path):
    examples, classes, teachers = 20_000, 6, 3
    words = {f"teacher-{n}": Words(dtype="float16", classes=classes) for n in range(teachers)}
    from ds_distill.cache.build import block_rows_for

    rows = block_rows_for(examples, 2 * classes)
    write_cache(tmp_path / "cache", make_keys(examples), words, block_rows=rows, ranks=8)
    size = sum(len(content) for content in contents(tmp_path / "cache").values())
    assert size <= examples * (2 * classes * teachers + 24)
    check_rows(tmp_path / "cache", make_keys(examples)[::97], words)


BUILDER = """
import sys, time
from pathlib import Path
from ds_distill.cache.build import building
with building(Path(sys.argv[1])):
    print("building", flush=True)
    time.sleep(600)
"""


def test_a_second_builder_is_refused_until_the_first_one_is_gone(cache):
    path, _ = cache
    first = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "building\n"
        before = contents(path)
        with pytest.raises(UserError, match="another process is building it"):
            write_cache(path, make_keys(60), TWO)
        assert contents(path) == before
        check_rows(path, make_keys(50), TWO)  # reading needs no lock
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    write_cache(path, make_keys(60), TWO)
    check_rows(path, make_keys(60), TWO)


def test_a_teacher_may_be_named_like_the_folder_of_a_build(tmp_path):
    words = {BUILDING.strip("."): TWO["first"]}
    write_cache(tmp_path / "cache", make_keys(9), words)
    check_rows(tmp_path / "cache", make_keys(9), words)


def test_an_unfinished_build_of_something_else_is_dropped(tmp_path):
    path, keys = tmp_path / "cache", make_keys(20)
    teachers = {"first": (PRINT, TWO["first"])}
    with building(path):
        assert start_build(path, Plan(0, 8, [keys]), teachers) == 0
        writer = ShardWriter(path, Plan(0, 8, [keys]), "first", TWO["first"], 0, 1)
        writer.append(0, block("first", TWO["first"], keys[:8]), 8)
        writer.close()
        assert start_build(path, Plan(0, 8, [keys]), teachers) == 1
        assert start_build(path, Plan(0, 8, [keys[1:]]), teachers) is None
        assert start_build(path, Plan(0, 8, [keys[1:]]), teachers) == 0
        shutil.copytree(path, tmp_path / "copy")
    write_cache(path, keys, TWO)
    check_rows(path, keys, TWO)
    assert Manifest.read(path).blocks == 3
