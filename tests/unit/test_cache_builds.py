"""Builds: what one adds, how much room it takes, who may write."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cache_files import PRINT, TWO, check_rows, contents, make_keys, write_block, write_cache

from ds_distill.cache import build
from ds_distill.cache.build import Build, known_teachers
from ds_distill.cache.build_plan import BUILDING, Plan, block_rows_for
from ds_distill.cache.codecs import CompactCodec, TailShape
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.caching.missing import added_by, missing_from
from ds_distill.data.batches import Examples
from ds_distill.errors import UserError


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
    assert len([name for name in after if "shard" in name]) == 2 * (7 + 4)
    assert len(after) == 22 + 2  # the manifest and one index
    assert CacheReader(path).manifest.examples == 80
    check_rows(path, more, TWO)
    CacheReader(path).verify()
    write_cache(path, more[::-1], TWO)
    assert contents(path) == after


@pytest.mark.parametrize(
    ("schemas", "fingerprint", "message"),
    [
        ({**TWO, "third": TWO["first"]}, PRINT, "no teacher 'third', only first, second"),
        (TWO, {**PRINT, "weights": "w2"}, "weights 'w1', and the run has 'w2'"),
        (
            {**TWO, "second": SignalSchema(dtype="float16", classes=5)},
            PRINT,
            r"hidden \{-1: 4\}, and the run has \{\}",
        ),
        (
            {**TWO, "first": SignalSchema(dtype="float32", classes=3, mask_variants=2)},
            PRINT,
            "mask_variants None, and the run has 2",
        ),
    ],
)
def test_rows_of_others_are_not_added(cache, schemas, fingerprint, message):
    path, _ = cache
    before = contents(path)
    with pytest.raises(UserError, match=message):
        write_cache(path, make_keys(60), schemas, fingerprint=fingerprint)
    assert contents(path) == before


def test_rows_are_added_by_the_same_attention_alone(cache):
    path, keys = cache
    write_cache(path.with_name("other"), keys, TWO, fingerprint={**PRINT, "attention": "kernel 1"})
    path = path.with_name("other")
    now = {name: ({**PRINT, "attention": "padded"}, schemas) for name, schemas in TWO.items()}

    def split(keys: np.ndarray) -> Any:
        collate = SimpleNamespace(lengths=np.full(len(keys), 7))
        return Examples(torch.from_numpy(keys), np.zeros(len(keys), dtype=np.int64)), collate

    plan, _ = missing_from(path, [split(keys[::2])], now)
    assert plan.examples == 0
    with pytest.raises(UserError, match="with attention 'kernel 1', and the run has 'padded'"):
        missing_from(path, [split(make_keys(51))], now)
    same = {name: ({**PRINT, "attention": "kernel 1"}, schemas) for name, schemas in TWO.items()}
    assert missing_from(path, [split(make_keys(51))], same)[0].examples == 1


def test_what_a_build_has_added_is_what_it_lacked(cache):
    """To the row: those of the first block that it wrote, too, and none of before."""
    path, keys = cache
    more = np.concatenate([keys[:20], make_keys(30, "more ")])
    first_block = CacheReader(path).manifest.blocks
    collate: Any = SimpleNamespace(lengths=np.full(len(more), 7))
    split: Any = Examples(torch.from_numpy(more), np.zeros(len(more), dtype=np.int64)), collate
    now = {name: (PRINT, schemas) for name, schemas in TWO.items()}
    _, [lacked] = missing_from(path, [split], now)
    write_cache(path, more, TWO, block_rows=8)
    [added] = added_by(path, [split], first_block)
    assert len(added.indices) == 30 and added.indices.tolist() == lacked.indices.tolist()


def test_class_logits_cost_two_bytes_each_and_at_most_36_more(tmp_path):
    """24 of 400,000 examples, whose blocks are of more rows."""
    examples, classes, teachers = 20_000, 6, 3
    schemas = {
        f"teacher-{n}": SignalSchema(dtype="float16", classes=classes) for n in range(teachers)
    }
    rows = block_rows_for(examples, 2 * classes)
    write_cache(tmp_path / "cache", make_keys(examples), schemas, block_rows=rows, ranks=8)
    size = sum(len(content) for content in contents(tmp_path / "cache").values())
    assert size <= examples * (2 * classes * teachers + 36)
    check_rows(tmp_path / "cache", make_keys(examples)[::97], schemas)


FITTED = TailShape.fit([torch.randn(40, 50, generator=torch.Generator().manual_seed(0))], 0.1)
LM = {"dtype": "float16", "classes": 50, "mask_variants": 2, "temperature": 2.0}
BEGUN: dict[str, SignalSchema] = {
    "first": SignalSchema(dtype="float32", classes=3, mask_variants=2),
    "lm": SignalSchema(codec=CompactCodec(50, 0.1).to_json(), **LM),
}


@pytest.fixture
def started(tmp_path: Path) -> tuple[Path, Plan]:
    """A cache with 20 examples, and an unfinished build of 20 others with one block written."""
    path = tmp_path / "cache"
    write_cache(path, make_keys(20), BEGUN)
    plan = Plan(3, 8, [make_keys(20, "more ")])
    write_block(join(path, plan, BEGUN, kept=0), "first", 0)
    join(path, plan, BEGUN, kept=1)
    return path, plan


def join(path: Path, plan: Plan, schemas: dict[str, SignalSchema], kept: int) -> Build:
    build = Build(path, plan, with_fingerprint(schemas))
    assert build.join() == kept
    return build


def with_fingerprint(
    schemas: dict[str, SignalSchema], **changes: Any
) -> dict[str, tuple[dict[str, Any], SignalSchema]]:
    return {name: ({**PRINT, **changes}, kept) for name, kept in schemas.items()}


@pytest.mark.parametrize(
    ("keys", "first_block", "schemas", "changes", "message"),
    [
        (make_keys(19, "more "), 3, BEGUN, {}, "the number of examples: 20, not 19"),
        (make_keys(20, "other "), 3, BEGUN, {}, "the content keys of the examples: "),
        (None, 3, BEGUN, {"max_length": 64}, "teacher 'first' with max_length 128, not 64"),
        (None, 3, {"lm": BEGUN["lm"]}, {}, "started with a teacher 'first'"),
        (
            None,
            3,
            {**BEGUN, "lm": SignalSchema(codec=CompactCodec(50, 0.1, FITTED).to_json(), **LM)},
            {},
            "teacher 'lm' with codec tail None, not {'step': ",
        ),
    ],
)
def test_an_unfinished_build_of_something_else_is_refused(
    started, keys, first_block, schemas, changes, message
):
    path, plan = started
    before = contents(path)
    other = Plan(first_block, 8, [plan.keys[0] if keys is None else keys])
    with pytest.raises(UserError) as refused:
        Build(path, other, with_fingerprint(schemas, **changes)).join()
    text = str(refused.value)
    assert message in text and f"remove {path / BUILDING} to start again" in text
    assert len(text) < 700
    assert contents(path) == before
    shutil.rmtree(path / BUILDING)  # as the message says
    write_cache(path, np.concatenate([make_keys(20), make_keys(20, "other ")]), BEGUN)
    check_rows(path, make_keys(20, "other "), {"first": BEGUN["first"]})


@pytest.mark.parametrize("name", [f"{BUILDING}/plan.json", "first/shard-00000003.arrow"])
def test_a_read_that_fails_is_reported_and_nothing_is_deleted(started, name, monkeypatch):
    path, plan = started
    # The link by which a test makes an input/output error would be refused for where it leads.
    monkeypatch.setattr(build, "refuse_links_out", lambda cache: None)
    file, aside = path / name, path.with_name("aside")
    file.rename(aside)
    file.symlink_to("/proc/self/mem")  # reading its first byte is an input/output error
    left = sorted(path.rglob("*"))
    with pytest.raises(OSError) as failed:
        known_teachers(path)
        Build(path, plan, with_fingerprint(BEGUN)).join()
    assert failed.value.errno == errno.EIO
    assert sorted(path.rglob("*")) == left
    aside.replace(file)
    join(path, plan, BEGUN, kept=1)
    write_cache(path, np.concatenate([make_keys(20), *plan.keys]), BEGUN)
    check_rows(path, plan.keys[0], {"first": BEGUN["first"]})


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"teachers": 3}', "\udcff"])
def test_a_damaged_plan_is_refused(started, text):
    path, plan = started
    (path / BUILDING / "plan.json").write_text(text, errors="surrogateescape")
    before = contents(path)
    for read in (known_teachers, lambda path: join(path, plan, BEGUN, kept=1)):
        with pytest.raises(UserError, match=f"damaged .* Remove {path / BUILDING} and build again"):
            read(path)
    assert contents(path) == before


def test_what_a_finished_build_left_is_no_unfinished_one(started):
    """A kill after the manifest was written and before the build's folder was removed."""
    path, plan = started
    keys = np.concatenate([make_keys(20), *plan.keys])
    shutil.copytree(path / BUILDING, path.with_name("left"), symlinks=True)
    write_cache(path, keys, BEGUN)
    path.with_name("left").rename(path / BUILDING)
    assert known_teachers(path) == with_fingerprint(BEGUN)
    write_cache(path, np.concatenate([keys, make_keys(9, "third ")]), BEGUN)
    check_rows(path, np.concatenate([keys, make_keys(9, "third ")]), {"first": BEGUN["first"]})
    assert not (path / BUILDING).exists()
