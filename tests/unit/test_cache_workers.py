"""Several processes write a cache together. They come, die and freeze, and it ends as one would
have written it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_files import (
    PRINT,
    TWO,
    block,
    block_checksums,
    check_rows,
    contents,
    make_keys,
    write_cache,
)
from processes import fork

from ds_distill.cache import workers
from ds_distill.cache.build import finish_build, join_build
from ds_distill.cache.format import MANIFEST
from ds_distill.cache.plan import BUILDING, Plan
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.shards import ShardWriter, blocks_to_write
from ds_distill.errors import UserError

KEYS = make_keys(200)
TEACHERS = {name: (dict(PRINT), schema) for name, schema in TWO.items()}


@pytest.fixture
def children() -> Iterator[Callable[[Callable[[], None]], int]]:
    """Do something in a child process."""
    started: list[int] = []

    def start(work: Callable[[], None]) -> int:
        child = fork(work)
        started.append(child)
        return child

    yield start
    for child in started:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def write(path: Path, ranks: int = 1, seconds: float = 0.004) -> None:
    """As a worker does whose teacher takes some time for a block."""
    write_cache(
        path, KEYS, TWO, block_rows=4, ranks=ranks, acknowledge=lambda *of: time.sleep(seconds)
    )


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_whole(path: Path, whole: Path) -> None:
    assert block_checksums(path) == block_checksums(whole)
    assert {file.name for file in path.iterdir()} == {file.name for file in whole.iterdir()}
    check_rows(path, KEYS, TWO)
    CacheReader(path).verify()


@pytest.mark.parametrize("seed", range(6))
def test_four_workers_with_kills_and_a_late_one_write_what_one_writes(seed, tmp_path, children):
    draw = random.Random(seed)
    write(tmp_path / "whole", seconds=0)
    path = tmp_path / "cache"

    def start() -> int:
        return children(lambda: write(path, ranks=draw.randint(1, 3)))

    running = [start() for _ in range(4)]
    for _ in range(3):
        time.sleep(draw.uniform(0, 0.2))
        victim = running.pop(draw.randrange(len(running)))
        os.kill(victim, signal.SIGKILL)
        assert ended(victim) in (-signal.SIGKILL, 0)  # or it was the fastest of all
    running.append(start())  # the late one
    assert [ended(child) for child in running] == [0] * len(running)
    check_whole(path, tmp_path / "whole")


def test_claims_take_a_time_that_grows_with_their_number(tmp_path, monkeypatch):
    """A list of all claims for each block: 20 CPU minutes at 16,000 blocks."""
    plan, path = Plan(0, 1, [make_keys(1_000)]), tmp_path / "cache"
    found = join_build(path, plan, TEACHERS)
    assert found is not None
    worker, listed, listing = found[0], 0, os.listdir

    def counted(folder):
        nonlocal listed
        names = listing(folder)
        listed += len(names)
        return names

    monkeypatch.setattr(os, "listdir", counted)
    looked: list[int] = []
    take = worker._make
    monkeypatch.setattr(worker, "_make", lambda claim: (looked.append(1), take(claim))[1])
    claimed: list[int] = []
    while None not in (some := worker.claim("first", 2) or [None]):
        claimed += [at for at in some if at is not None]
    worker.close()
    assert sorted(claimed) == list(range(1_000))
    assert listed < 2_000 and len(looked) < 3_000


def test_they_share_the_work(tmp_path, children):
    path, ledger = tmp_path / "cache", tmp_path / "ledger"
    descriptor = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def work() -> None:
        def acknowledge(teacher: str, number: int) -> None:
            os.write(descriptor, f"{teacher} {number}\n".encode())
            time.sleep(0.02)

        write_cache(path, KEYS, TWO, block_rows=4, acknowledge=acknowledge)

    running = [children(work) for _ in range(3)]
    assert [ended(child) for child in running] == [0, 0, 0]
    lines = ledger.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 2 * len(KEYS) // 4, "a block was written twice"
    shards = list((path / "first").glob("shard-*"))
    assert len(shards) == 3 and all(shard.stat().st_size > 2000 for shard in shards)
    check_rows(path, KEYS, TWO)


@pytest.mark.parametrize("built_again", [False, True])
def test_one_that_freezes_is_replaced_and_may_wake_up_after_the_end(
    built_again, tmp_path, children, monkeypatch
):
    monkeypatch.setattr(workers, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(workers, "BEAT_SECONDS", 0.1)
    write(tmp_path / "whole", seconds=0)
    path = tmp_path / "cache"
    frozen = children(lambda: write(path, ranks=3))
    while len(list(path.glob(f"{BUILDING}/claims/second.*"))) < 5:
        time.sleep(0.002)
    os.kill(frozen, signal.SIGSTOP)
    assert not (path / MANIFEST).exists()
    write(path, seconds=0)
    check_whole(path, tmp_path / "whole")
    if built_again:  # another build of the same cache goes on by then
        joined = join_build(path, Plan(50, 4, [make_keys(9, "new ")]), TEACHERS)
        assert joined is not None
        joined[0].close()
    before = contents(path)
    os.kill(frozen, signal.SIGCONT)
    assert ended(frozen) == 0
    assert contents(path) == before
    if not built_again:
        check_whole(path, tmp_path / "whole")


def test_a_block_that_two_have_written_is_in_the_cache_once(tmp_path):
    plan = Plan(0, 8, [make_keys(20)])
    schema = TWO["first"]
    for number in range(2):
        joined = join_build(tmp_path, plan, {"first": (PRINT, schema)})
        assert joined is not None
        worker, _ = joined
        writer = ShardWriter(tmp_path, plan, "first", schema, f"{number:03d}-00000-of-00001")
        for at in ((0, 1), (1, 2))[number]:
            _, part = plan.blocks[at]
            writer.append(at, block("first", schema, plan.keys[0][part]), part.stop - part.start)
        writer.close()
        worker.close()
    assert blocks_to_write(tmp_path, plan, "first") == []
    finish_build(tmp_path, plan, {"first": (PRINT, schema)}, worker)
    reader = CacheReader(tmp_path)
    reader.verify()
    check_rows(tmp_path, plan.keys[0], {"first": schema})
    assert [len(shard.blocks) for shard in reader.manifest.teachers["first"].shards] == [2, 1]


def test_where_another_one_was_faster_the_plan_is_made_anew(tmp_path):
    plan = Plan(0, 8, [make_keys(20)])
    write_cache(tmp_path, make_keys(10), TWO)
    before = contents(tmp_path)
    assert join_build(tmp_path, plan, TEACHERS) is None
    assert contents(tmp_path) == before


def test_what_is_being_built_is_not_thrown_away_for_something_else(tmp_path, children):
    path = tmp_path / "cache"
    write_cache(path, make_keys(9, "old "), TWO, block_rows=4)

    def build() -> None:
        write_cache(
            path,
            make_keys(30),
            TWO,
            acknowledge=lambda *of: time.sleep(60),
        )

    child = children(build)
    while not any(journal.stat().st_size for journal in path.glob(f"{BUILDING}/*.jsonl")):
        time.sleep(0.01)
    before = contents(path)
    with pytest.raises(UserError, match=rf"process {child} on host \S+ is building it, with ano"):
        write_cache(path, make_keys(31), TWO)
    write_cache(path, make_keys(9, "old "), TWO)  # all there: nothing to build
    assert contents(path) == before
    check_rows(path, make_keys(9, "old "), TWO)
    os.kill(child, signal.SIGKILL)
    ended(child)
    with pytest.raises(UserError, match="holds an unfinished build"):
        write_cache(path, make_keys(31), TWO)
