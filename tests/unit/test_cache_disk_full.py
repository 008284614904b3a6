"""No space left: a clear error, nothing corrupt, and the same call goes on when there is space."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from cache_files import (
    block,
    block_checksums,
    check_rows,
    contents,
    journal_blocks,
    make_keys,
    write_cache,
)

from ds_distill.cache.build import finish_build, join_build
from ds_distill.cache.build_plan import BUILDING, Plan
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.cache.shards import ShardWriter
from ds_distill.cache.workers import writer_name
from ds_distill.files import is_disk_full

SCHEMAS = {
    "first": SignalSchema(dtype="float32", classes=40),
    "second": SignalSchema(dtype="float16", classes=9),
}
KEYS = make_keys(600)


@pytest.fixture
def disk(small_disk) -> Path:
    return small_disk(512)


def leave(disk: Path, space: int) -> Path:
    """Fill a disk but for some bytes; returns what fills it."""
    dummy = disk / "filler"
    dummy.unlink(missing_ok=True)
    dummy.write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - space))
    return dummy


def test_a_full_disk_at_any_moment_loses_nothing(disk, tmp_path):
    """It is full again and again, at each attempt some pages later."""
    write_cache(tmp_path / "whole", KEYS, SCHEMAS, ranks=2)
    path, draw, refused, journalled = disk / "cache", random.Random(0), 0, {}
    while True:
        space = sum(len(content) for content in contents(path).values()) if path.exists() else 0
        dummy = leave(disk, draw.choice([0, 1, 2, 3, 5, 8]) * 4096)
        try:
            write_cache(path, KEYS, SCHEMAS, ranks=2)
            break
        except OSError as error:
            assert error.errno == errno.ENOSPC and is_disk_full(error)
            refused += 1
        dummy.unlink()
        assert refused < 200, space
        if (path / BUILDING / "plan.json").is_file():
            now = journal_blocks(path, SCHEMAS)
            assert journalled.items() <= now.items()
            journalled = now
    dummy.unlink()
    assert refused >= 10
    assert block_checksums(path) == block_checksums(tmp_path / "whole")
    check_rows(path, KEYS, SCHEMAS)
    CacheReader(path).verify()


def test_a_full_disk_leaves_a_cache_that_is_there_as_it_is(disk):
    path = disk / "cache"
    write_cache(path, KEYS[:100], SCHEMAS)
    before = contents(path)
    dummy = leave(disk, 3 * 4096)
    with pytest.raises(OSError, match="No space left"):
        write_cache(path, KEYS, SCHEMAS)
    after = contents(path)
    assert {name: after[name] for name in before} == before
    check_rows(path, KEYS[:100], SCHEMAS)
    dummy.unlink()
    write_cache(path, KEYS, SCHEMAS)
    check_rows(path, KEYS, SCHEMAS)


def test_after_a_block_that_had_no_room_the_next_writer_goes_on(disk):
    """In the same process: what the first worker could not write must not come later."""
    path, schema = disk / "cache", SCHEMAS["first"]
    plan, teachers = Plan(0, 256, [KEYS]), {"first": ({}, SCHEMAS["first"])}
    blocks = [block("first", schema, KEYS[part]) for _, part in plan.blocks]
    sizes = [part.stop - part.start for _, part in plan.blocks]
    joined = join_build(path, plan, teachers)
    assert joined is not None
    worker, name = joined[0], writer_name(joined[0].number, 0)
    failed = ShardWriter(path, plan, "first", schema, name)
    failed.append(0, blocks[0], sizes[0])
    dummy = leave(disk, 2 * 4096)
    with pytest.raises(OSError, match="No space left"):
        failed.append(1, blocks[1], sizes[1])
    dummy.unlink()
    failed.close()
    worker.close()
    joined = join_build(path, plan, teachers)
    assert joined is not None and joined[1] == 1
    worker = joined[0]
    writer = ShardWriter(path, plan, "first", schema, writer_name(worker.number, 0))
    for at in (1, 2):
        writer.append(at, blocks[at], sizes[at])
    writer.close()
    worker.close()
    finish_build(path, plan, teachers, worker)
    check_rows(path, KEYS, {"first": schema})
    CacheReader(path).verify()
