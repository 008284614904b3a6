"""No space left: a clear error, nothing corrupt, and the same call goes on when there is space."""

import errno
import os
import random

import pytest
from cache_files import block_checksums, check_rows, contents, make_keys, published, write_cache

from ds_distill.cache.build_plan import BUILDING
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.files import is_disk_full

SCHEMAS = {
    "first": SignalSchema(dtype="float32", classes=40),
    "second": SignalSchema(dtype="float16", classes=9),
}
KEYS = make_keys(600)


@pytest.fixture
def disk(small_disk):
    return small_disk(2048)


def leave(disk, space):
    """Fill a disk but for some bytes; returns what fills it."""
    dummy = disk / "filler"
    dummy.unlink(missing_ok=True)
    dummy.write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - space))
    return dummy


def test_a_full_disk_at_any_moment_loses_nothing(disk, tmp_path):
    """It is full again and again, at each attempt some pages later."""
    write_cache(tmp_path / "whole", KEYS, SCHEMAS, ranks=2)
    path, draw, refused, there = disk / "cache", random.Random(0), 0, {}
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
            now = published(path, SCHEMAS)
            assert there.items() <= now.items()
            there = now
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
