"""`ds-distill cache build`: killed and continued, on other numbers of ranks, in a shared folder."""

import random

from ci.test_cache_build import (  # noqa: F401
    BLOCKS,
    blocks,
    blocks_are_written,
    builds,
    cache_of,
    check_whole,
    classifiers,
    finish,
    settings,
    wait_for_claims,
    whole,
    workers,
)
from processes import kill_all


def test_four_workers_with_kills_and_a_late_one(workers, whole, tmp_path):
    draw, shared = random.Random(0), tmp_path / "shared"
    running = [workers(), workers(2), workers(), workers()]
    for share in (0.2, 0.4, 0.6):
        wait_for_claims(shared, share * BLOCKS, running[0])
        victim = running.pop(draw.randrange(len(running)))
        kill_all(victim)
    running.append(workers())
    for process in running:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
    check_whole(shared, whole)


def test_five_kills_change_nothing(builds, whole, tmp_path):
    draw, folder = random.Random(0), tmp_path / "run"
    for share in sorted(draw.uniform(0.1, 0.95) for _ in range(5)):
        more = (blocks(folder) + 1) / BLOCKS  # each gets somewhere
        moment = blocks_are_written(min(max(share, more), 1))
        assert builds(2).kill(folder, moment, resume=False)
    assert finish(builds(2), folder)["kept"] >= 0.4 * BLOCKS
    check_whole(cache_of(folder), whole)
