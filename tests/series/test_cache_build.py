"""`ds-distill cache build`: killed and continued, on other numbers of ranks, in a shared folder."""

from __future__ import annotations

import random
import time

from cache_files import block_checksums
from ci.test_cache_build import (  # noqa: F401
    BLOCKS,
    builds,
    cache_of,
    claimed,
    classifiers,
    settings,
    whole,
    workers,
    written,
)
from processes import kill_all

from ds_distill.cache.build_plan import BUILDING
from ds_distill.cache.reader import CacheReader


def test_four_workers_with_kills_and_a_late_one(workers, whole, tmp_path):
    draw, shared = random.Random(0), tmp_path / "shared"
    running = [workers(), workers(2), workers(), workers()]
    for share in (0.2, 0.4, 0.6):
        while claimed(shared) < share * BLOCKS:
            time.sleep(0.001)
        victim = running.pop(draw.randrange(len(running)))
        kill_all(victim)
    running.append(workers())
    for process in running:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
    assert block_checksums(shared) == block_checksums(cache_of(whole))
    CacheReader(shared).verify()
    assert not (shared / BUILDING).exists()


def test_five_kills_change_nothing(builds, whole, tmp_path):
    draw = random.Random(0)
    for share in sorted(draw.uniform(0.1, 0.95) for _ in range(5)):
        more = (written(tmp_path / "run") + 1) / BLOCKS  # each gets somewhere
        builds.kill(tmp_path / "run", ranks=2, share=min(max(share, more), 1))
    assert builds.finish(tmp_path / "run", ranks=2)["kept"] >= 0.4 * BLOCKS
    assert block_checksums(cache_of(tmp_path / "run")) == block_checksums(cache_of(whole))
    CacheReader(cache_of(tmp_path / "run")).verify()
