"""A build that is killed at any moment goes on where it was, and ends with the same blocks, byte
for byte, as if nothing had been; only the files that they lie in are others."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cache_files import (
    PRINT,
    block_checksums,
    check_rows,
    contents,
    make_keys,
    published,
    write_block,
    write_cache,
)
from processes import fork

from ds_distill.cache.build import Build
from ds_distill.cache.build_plan import BUILDING, Plan
from ds_distill.cache.format import MANIFEST, Manifest
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema

SCHEMAS = {
    "first": SignalSchema(dtype="float32", classes=3),
    "second": SignalSchema(dtype="float16", classes=5, hidden={-1: 4}),
}
OLD, ALL = make_keys(20), make_keys(140)
BLOCK_ROWS = 4
BLOCKS = 2 * len(ALL) // BLOCK_ROWS


def write_all(path: Path, ledger: Path, ranks: int = 2) -> None:
    """Write everything; the ledger gets a line for each block that was acknowledged."""
    descriptor = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def acknowledge(teacher: str, number: int) -> None:
        os.write(descriptor, f"{teacher} {number}\n".encode())

    write_cache(path, ALL, SCHEMAS, block_rows=BLOCK_ROWS, ranks=ranks, acknowledge=acknowledge)


def die_at_call(count: int, draw: random.Random) -> None:
    """Let this process kill itself at one of its next calls that change files: before it or
    after it."""
    left = [count]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                how = draw.choice(["before", "after"])
                if how == "after":
                    call(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return run

    for name in ("open", "fsync", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def forked(work: Callable[[], None]) -> bool:
    """Do work in a child. Returns whether it was killed; raises AssertionError if it failed."""
    status = os.waitpid(fork(work), 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0
    return killed


def stage(path: Path) -> str:
    """How far a build had come when it was killed."""
    if not (path / BUILDING / "plan.json").is_file():
        done = (path / MANIFEST).is_file() and Manifest.read(path).examples == len(ALL)
        return "cleaning up" if done else "before the plan"
    if (path / MANIFEST).is_file() and Manifest.read(path).examples == len(ALL):
        return "cleaning up"
    return "blocks" if len(published(path, SCHEMAS)) < BLOCKS else "finishing"


class Series:
    """Builds that are killed again and again until they end; each from nothing, or from a cache
    with a few rows."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.place, self.draw = tmp_path, random.Random(seed)
        self.stages: Counter[str] = Counter()
        write_cache(tmp_path / "old", OLD, SCHEMAS, block_rows=BLOCK_ROWS, ranks=2)
        shutil.copytree(tmp_path / "old", tmp_path / "whole-added")
        for name in ("whole-new", "whole-added"):
            write_all(tmp_path / name, tmp_path / "whole-ledger")

    def run(self, kills: int, ranks: Callable[[], int], among_blocks: int = 0) -> list[Path]:
        """Until there were so many kills, and so many of them while blocks were written. Returns
        the finished caches."""
        made: list[Path] = []
        while self.stages.total() < kills or self.stages["blocks"] < among_blocks:
            assert self.stages.total() < 10 * kills, f"too few among blocks: {self.stages}"
            path = self.place / f"cache-{len(made)}"
            if len(made) % 2:
                shutil.copytree(self.place / "old", path)
            ledger = self.place / f"ledger-{len(made)}"
            while self.one(path, ledger, ranks()):
                pass
            made.append(path)
        return made

    def one(self, path: Path, ledger: Path, ranks: int) -> bool:
        """Write until the end or a kill. Returns whether it was killed."""
        before = published(path, SCHEMAS)
        seed = self.draw.random()
        calls = self.draw.choice([20, 60, 300])

        def work() -> None:
            draw = random.Random(seed)
            die_at_call(draw.randint(1, calls), draw)
            write_all(path, ledger, ranks)

        killed = forked(work)
        if killed:
            self.stages[stage(path)] += 1
        lines = ledger.read_text().splitlines() if ledger.is_file() else []
        assert len(lines) == len(set(lines)), "a block that was acknowledged was written again"
        if (path / BUILDING / "plan.json").is_file() and stage(path) != "cleaning up":
            there = published(path, SCHEMAS)
            assert {tuple(line.split()) for line in lines} <= {(t, str(n)) for t, n in there}
            assert before.items() <= there.items(), "a block that was there is lost or another"
        return killed

    def check_equal(self, made: list[Path]) -> None:
        for number, path in enumerate(made):
            whole = self.place / ("whole-added" if number % 2 else "whole-new")
            assert block_checksums(path) == block_checksums(whole)
            assert {file.name for file in path.iterdir()} == {file.name for file in whole.iterdir()}
            CacheReader(path).verify()


def test_kills_between_other_numbers_of_ranks_keep_every_row(tmp_path):
    """Rows and their bytes are the same; only the files that they lie in are others."""
    series = Series(tmp_path, seed=3)
    made = series.run(kills=20, ranks=lambda: series.draw.randint(1, 3))
    wanted = block_checksums(tmp_path / "whole-new")
    for number, path in enumerate(made):
        check_rows(path, np.concatenate([ALL[::3], ALL[1::3]]), SCHEMAS)
        CacheReader(path).verify()
        assert not (path / BUILDING).exists()
        if number % 2 == 0:
            assert block_checksums(path) == wanted


def begun(path: Path, keys: np.ndarray = ALL, first_block: int = 0) -> Build:
    teachers = {name: (PRINT, schema) for name, schema in SCHEMAS.items()}
    build = Build(path, Plan(first_block, BLOCK_ROWS, [keys]), teachers)
    assert build.join() == 0
    return build


def test_a_block_is_leased_to_one_process_until_it_ends(tmp_path):
    one, other = begun(tmp_path), Build(tmp_path, begun(tmp_path).plan, begun(tmp_path).teachers)
    assert one.claim("first", 2) == [0, 1] and other.claim("first", 3) == [2, 3, 4]
    write_block(one, "first", 1)
    assert one.claim("first", 30) == [*range(5, 35)]
    assert other.claim("first", 2) == [None, None], "blocks that the other one writes"
    del one  # as the end of its process does
    assert other.claim("first", 2) == [0, 5], "1 is written"


def test_one_that_stood_still_until_after_the_end_writes_nothing(tmp_path):
    late = begun(tmp_path)
    assert late.claim("second", 1) == [0]
    late._leases.clear()
    write_cache(tmp_path, ALL, SCHEMAS, block_rows=BLOCK_ROWS)
    before = contents(tmp_path)
    write_block(late, "second", 0)
    late.finish()
    assert late.claim("second", 1) is None
    begun(tmp_path, make_keys(9, "more "), first_block=len(ALL) // BLOCK_ROWS)
    write_block(late, "second", 0)
    assert late.claim("second", 1) is None
    late.finish()
    assert {name: contents(tmp_path)[name] for name in before} == before


def test_where_another_one_was_faster_the_plan_is_made_anew(tmp_path):
    write_cache(tmp_path, OLD, SCHEMAS)
    before = contents(tmp_path)
    teachers = {name: (PRINT, schema) for name, schema in SCHEMAS.items()}
    assert Build(tmp_path, Plan(0, 8, [ALL]), teachers).join() is None
    assert contents(tmp_path) == before
