"""Several processes write a cache together. They come, die and freeze, and it ends as one would
have written it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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

from ds_distill.cache import build, format, workers
from ds_distill.cache.build import finish_build, join_build
from ds_distill.cache.build_plan import BUILDING, Plan
from ds_distill.cache.format import MANIFEST
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.shards import ShardWriter, blocks_to_write
from ds_distill.cache.workers import Worker, writer_name
from ds_distill.errors import UserError
from ds_distill.process import identity as process_id
from ds_distill.process import lock

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


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.further) for seed in range(2, 6))]
)
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


def test_a_claim_made_while_another_worker_joins_is_left_alone(tmp_path, monkeypatch):
    """One that joins removes the claims of the dead."""
    plan = Plan(0, 4, [KEYS])
    joined = [join_build(tmp_path, plan, TEACHERS) for _ in range(2)]
    dead, first = (found[0] for found in joined if found is not None)
    assert dead.claim("first", 4) == [0, 1, 2, 3]
    dead.close()
    claimed: list[int | None] = []
    owner = Worker._owner

    def looked(worker: Worker, teacher: str, at: int) -> str | None:
        found = owner(worker, teacher, at)
        if at == 4 and not claimed:
            claimed.extend(first.claim(teacher, 2) or [])
        return found

    monkeypatch.setattr(Worker, "_owner", looked)
    late = join_build(tmp_path, plan, TEACHERS)
    assert claimed == [4, 5] and late is not None
    rest = [at for at in range(len(KEYS) // 4) if at not in claimed]
    assert late[0].claim("first", len(KEYS) // 4) == [*rest, None, None]


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_worker_wrote_before_it_ended_is_not_written_again(waits, tmp_path, monkeypatch):
    plan = Plan(0, 4, [make_keys(4)])
    joined = join_build(tmp_path, plan, TEACHERS)
    late = join_build(tmp_path, plan, TEACHERS)
    assert joined is not None and late is not None
    first, owner = joined[0], Worker._owner
    assert first.claim("first", 1) == [0]
    writer = ShardWriter(tmp_path, plan, "first", TWO["first"], writer_name(first.number, 0))

    def looked(worker: Worker, teacher: str, at: int) -> str | None:
        """The journals were read before."""
        if writer is not None and not first._ended.is_set():
            write_blocks(writer, plan, "first", [0])
            writer.close()
            first.close()
        return owner(worker, teacher, at)

    monkeypatch.setattr(Worker, "_owner", looked)
    if not waits:
        late = join_build(tmp_path, plan, TEACHERS)
        assert late is not None
    assert late[0].claim("first", 1) in ([None], None)
    assert late[0].claim("first", 1) is None


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a minute takes a second."""
    for module in (workers, lock):
        monkeypatch.setattr(module, "STALE_SECONDS", 1.0)
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)


def begin_another(path: Path) -> Worker:
    """Another build of a cache, with a block written."""
    plan = Plan(50, 4, [make_keys(9, "new ")])
    joined = join_build(path, plan, TEACHERS)
    assert joined is not None
    writer = ShardWriter(path, plan, "first", TWO["first"], writer_name(joined[0].number, 0))
    write_blocks(writer, plan, "first", range(1))
    writer.close()
    return joined[0]


def write_blocks(writer: ShardWriter, plan: Plan, teacher: str, which: Iterable[int]) -> None:
    for at in which:
        split, part = plan.blocks[at]
        batch = block(teacher, TWO[teacher], plan.keys[split][part])
        writer.append(at, batch, part.stop - part.start)


@pytest.mark.parametrize("built_again", [False, True])
@pytest.mark.parametrize("teacher", ["first", "second"])
def test_one_that_freezes_is_replaced_and_may_wake_up_after_the_end(
    teacher, built_again, tmp_path, children, soon
):
    write(tmp_path / "whole", seconds=0)
    path = tmp_path / "cache"
    frozen = children(lambda: write(path, ranks=3))
    while len(list(path.glob(f"{BUILDING}/claims/{teacher}.*"))) < 5:
        time.sleep(0.002)
    os.kill(frozen, signal.SIGSTOP)
    assert not (path / MANIFEST).exists()
    write(path, seconds=0)
    check_whole(path, tmp_path / "whole")
    if built_again:  # another build of the same cache goes on by then
        begin_another(path).close()
    before = contents(path)
    os.kill(frozen, signal.SIGCONT)
    assert ended(frozen) == 0
    assert contents(path) == before
    if not built_again:
        check_whole(path, tmp_path / "whole")


@pytest.mark.parametrize(
    ("module", "step"),
    [(build, "written"), (build, "close_shard"), (build, "_manifest"), (format, "publish_file")],
)
def test_one_that_freezes_with_the_lock_loses_it_and_does_no_harm(
    module, step, tmp_path, children, soon
):
    """Others wait for a minute, whatever host it is on, and finish the build; it wakes up when the
    next one goes on."""
    write(tmp_path / "whole", seconds=0)
    path = tmp_path / "cache"

    def freeze() -> None:
        does = getattr(module, step)

        def stopped(*given: Any, **named: Any) -> Any:
            if blocks_to_write(path, Plan(0, 4, [KEYS]), "second") == []:
                setattr(module, step, does)
                os.kill(os.getpid(), signal.SIGSTOP)
            return does(*given, **named)

        setattr(module, step, stopped)
        write(path, seconds=0)

    frozen = children(freeze)
    assert os.WIFSTOPPED(os.waitpid(frozen, os.WUNTRACED)[1])
    assert not (path / MANIFEST).exists() and (path / lock.NAME).exists()
    at = time.monotonic()
    write(path, seconds=0)
    assert time.monotonic() - at > 0.9
    check_whole(path, tmp_path / "whole")
    other = begin_another(path)
    before = contents(path)
    os.kill(frozen, signal.SIGCONT)
    assert ended(frozen) == 0
    assert contents(path) == before
    other.close()


def test_a_worker_that_comes_between_the_last_block_and_the_manifest_destroys_nothing(tmp_path):
    plan, teachers = Plan(0, 8, [make_keys(20)]), {"first": (PRINT, TWO["first"])}
    joined = join_build(tmp_path, plan, teachers)
    assert joined is not None
    first, _ = joined
    writer = ShardWriter(tmp_path, plan, "first", TWO["first"], writer_name(first.number, 0))
    write_blocks(writer, plan, "first", range(3))
    writer.close()
    first.close()
    joined = join_build(tmp_path, plan, teachers)
    assert joined is not None
    late, _ = joined
    finish_build(tmp_path, plan, teachers, first)
    before = contents(tmp_path)
    for name in (first, late):  # the number is that of the first one, or it is another
        writer = ShardWriter(tmp_path, plan, "first", TWO["first"], writer_name(name.number, 0))
        write_blocks(writer, plan, "first", range(2))
        writer.close()
    late.close()
    assert contents(tmp_path) == before
    CacheReader(tmp_path).verify()
    check_rows(tmp_path, plan.keys[0], {"first": TWO["first"]})


def test_what_a_rank_still_writes_is_in_no_cache(tmp_path, monkeypatch):
    """A rank on another host goes on for a while after the main process of its worker has ended."""
    plan, teachers = Plan(0, 8, [make_keys(20)]), {"first": (PRINT, TWO["first"])}
    joined = join_build(tmp_path, plan, teachers)
    assert joined is not None
    worker, _ = joined
    with monkeypatch.context() as patch:
        patch.setattr(process_id, "machine", lambda: "another")
        writer = ShardWriter(tmp_path, plan, "first", TWO["first"], writer_name(worker.number, 1))
        write_blocks(writer, plan, "first", range(3))
    worker.close()
    finish_build(tmp_path, plan, teachers, worker)
    before = contents(tmp_path)
    write_blocks(writer, plan, "first", range(2))
    writer.close()
    assert contents(tmp_path) == before
    CacheReader(tmp_path).verify()
    check_rows(tmp_path, plan.keys[0], {"first": TWO["first"]})


@pytest.mark.parametrize("hours", [-1, 1])
def test_one_whose_clock_is_an_hour_off_is_replaced_after_a_minute_too(hours, tmp_path, soon):
    """Killed on another host."""
    joined = join_build(tmp_path, Plan(0, 4, [KEYS]), TEACHERS)
    assert joined is not None
    killed, _ = joined
    assert killed.claim("first", 1) == [0]
    killed._ended.set()
    killed._beating.join()
    file = killed.folder / workers.PROCESS
    file.write_text(json.dumps({**json.loads(file.read_text()), "machine": "another"}))
    at = time.time() + 3600 * hours
    os.utime(file, (at, at))
    begun = time.monotonic()
    write(tmp_path, seconds=0)
    assert 0.9 < time.monotonic() - begun < 20
    check_rows(tmp_path, KEYS, TWO)


def test_a_block_that_two_have_written_is_in_the_cache_once(tmp_path):
    plan = Plan(0, 8, [make_keys(20)])
    schema = TWO["first"]
    for number in range(2):
        joined = join_build(tmp_path, plan, {"first": (PRINT, schema)})
        assert joined is not None
        worker, _ = joined
        writer = ShardWriter(tmp_path, plan, "first", schema, writer_name(worker.number, 0))
        write_blocks(writer, plan, "first", ((0, 1), (1, 2))[number])
        writer.close()
        worker.close()
    assert blocks_to_write(tmp_path, plan, "first") == []
    finish_build(tmp_path, plan, {"first": (PRINT, schema)}, worker)
    reader = CacheReader(tmp_path)
    reader.verify()
    check_rows(tmp_path, plan.keys[0], {"first": schema})
    shards = reader.manifest.teachers["first"].shards
    assert sorted(len(shard.blocks) for shard in shards) == [1, 2]


def test_where_another_one_was_faster_the_plan_is_made_anew(tmp_path):
    plan = Plan(0, 8, [make_keys(20)])
    write_cache(tmp_path, make_keys(10), TWO)
    before = contents(tmp_path)
    assert join_build(tmp_path, plan, TEACHERS) is None
    assert contents(tmp_path) == before


def test_what_is_being_built_is_not_thrown_away_for_something_else(tmp_path, children):
    path = tmp_path / "cache"
    write_cache(path, make_keys(9, "old "), TWO, block_rows=4)

    def begin() -> None:
        write_cache(path, make_keys(30), TWO, acknowledge=lambda *of: time.sleep(60))

    child = children(begin)
    journals = f"{BUILDING}/workers/*/*.jsonl"
    while not any(b"\n[" in journal.read_bytes() for journal in path.glob(journals)):
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
