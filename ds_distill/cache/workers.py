"""The processes that write a build together: any number, on all hosts that share the cache's
folder. They come and go without a word to each other.

    .building/workers/NUMBER.json     the process of a worker, as long as it writes
    .building/claims/TEACHER.BLOCK    the number of the worker that writes a block

A claim is a symbolic link to that number: made by one worker alone, at once with its content, and
without a block of the disk. That of a worker that has ended, or gives no sign, is taken over. Where
such a worker goes on after all, a block is written twice, and the cache has it once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from ds_distill.cache.plan import BUILDING, PLAN, Plan
from ds_distill.cache.shards import blocks_to_write
from ds_distill.files import write_json
from ds_distill.lock import BEAT_SECONDS, STALE_SECONDS
from ds_distill.process_id import ProcessId

WORKERS, CLAIMS = "workers", "claims"

AT_ONCE = 256
"""Blocks that are looked at before it is asked whether any of them can be claimed."""


class Worker:
    """This process among those that write a build; of several ranks their main process."""

    def __init__(self, cache: Path, plan: Plan, teachers: list[str]) -> None:
        """Join a build whose plan is written. In the lock of the cache's folder."""
        self._cache, self._plan = cache, plan
        self._claims = cache / BUILDING / CLAIMS
        self._build = _identity(cache)
        self._own: set[tuple[str, int]] = set()
        self._may_be_unclaimed: dict[str, dict[int, None]] = {}
        self.number = 0
        while _may_write(cache, self.number):
            self.number += 1
        self._file = _file(cache, self.number)
        write_json(self._file, asdict(ProcessId.of_this()), indent=None)
        self._free_claims(teachers)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="cache worker")
        self._beating.start()

    def _free_claims(self, teachers: list[str]) -> None:
        """Remove the claims of workers that have ended, on blocks that they have not written."""
        for teacher in teachers:
            for at in blocks_to_write(self._cache, self._plan, teacher):
                if self._is_over(teacher, at):
                    self._claim_file(teacher, at).unlink(missing_ok=True)

    def writer_name(self, rank: int, ranks: int) -> str:
        """The name of one of its ranks, for `ShardWriter`."""
        return writer_name(self.number, rank, ranks)

    def build_goes_on(self) -> bool:
        """Whether the build is unfinished; there may be another one of the cache by now."""
        return _identity(self._cache) == self._build

    def claim(self, teacher: str, ranks: int) -> list[int | None] | None:
        """The next blocks of a teacher, positions in `plan.blocks`, one for each rank or None.

        All are None as long as other workers write what is left. None: all blocks are written.
        """
        if not self.build_goes_on():
            return None
        assigned = self._assign(teacher, self._unclaimed(teacher), ranks, self._make)
        if any(at is not None for at in assigned):
            return assigned
        left = blocks_to_write(self._cache, self._plan, teacher)
        if not left:
            return None
        over = (at for at in left if (teacher, at) not in self._own and self._is_over(teacher, at))
        return self._assign(teacher, over, ranks, self._take_over)

    def _unclaimed(self, teacher: str) -> Iterator[int]:
        """Blocks that may be unclaimed, in order. Each is looked at until it has a claim, and then
        no more: a list of all claims for each block takes a time that grows with their square."""
        if teacher not in self._may_be_unclaimed:
            self._may_be_unclaimed[teacher] = dict.fromkeys(range(len(self._plan.blocks)))
        left = self._may_be_unclaimed[teacher]
        while some := list(islice(left, AT_ONCE)):
            before = len(left)
            for at in some:
                yield at
                if os.path.lexists(self._claim_file(teacher, at)):
                    del left[at]
            if len(left) == before:
                return

    def claimed(self, teacher: str) -> list[int]:
        """The blocks of a teacher that any worker has claimed, positions in `plan.blocks`."""
        with suppress(FileNotFoundError):
            names = (name.rpartition(".") for name in os.listdir(self._claims))
            return [int(number) for of, _, number in names if of == teacher]
        return []

    def _assign(
        self, teacher: str, free: Iterable[int], ranks: int, take: Callable[[Path], bool]
    ) -> list[int | None]:
        assigned: list[int | None] = [None] * ranks
        for at in free:
            if None not in assigned:
                break
            # The first worker's ranks have blocks of their own: what a lone build writes, and
            # where, does not depend on kills.
            number = self._plan.first_block + at
            rank = number % ranks if self.number == 0 else assigned.index(None)
            if assigned[rank] is None and take(self._claim_file(teacher, at)):
                assigned[rank] = at
                self._own.add((teacher, at))
        return assigned

    def _make(self, claim: Path) -> bool:
        try:
            claim.symlink_to(str(self.number))
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def _take_over(self, claim: Path) -> bool:
        """Two workers may do it at once; the block is written twice then."""
        aside = claim.with_name(f".{claim.name}.{self.number}")
        try:
            aside.unlink(missing_ok=True)  # of a worker of this number that was killed here
            aside.symlink_to(str(self.number))
            os.replace(aside, claim)
        except FileNotFoundError:  # another worker has finished the build
            return False
        return True

    def _owner(self, teacher: str, at: int) -> int | None:
        """The worker that has claimed a block, if one has."""
        try:
            return int(os.readlink(self._claim_file(teacher, at)))
        except FileNotFoundError:
            return None

    def _is_over(self, teacher: str, at: int) -> bool:
        """Whether a claim is of nobody who would still write the block."""
        owner = self._owner(teacher, at)
        return owner is None or owner == self.number or not self._writes(owner)

    def _writes(self, number: int) -> bool:
        """Whether there are signs of another worker."""
        return _may_write(self._cache, number) and not _is_silent(self._cache, number)

    def _claim_file(self, teacher: str, at: int) -> Path:
        return self._claims / f"{teacher}.{at:08d}"

    def others(self) -> list[str]:
        """The other workers that write, in words."""
        if not self.build_goes_on():
            return []
        return [
            _describe(self._cache, number)
            for number in _numbers(self._cache)
            if number != self.number and self._writes(number)
        ]

    def in_use(self, shard: str) -> bool:
        """Whether the writer of a shard may still write: another worker that is not known to have
        ended, though it may give no sign."""
        number = int(shard.split("-")[2])
        return number != self.number and _may_write(self._cache, number)

    def close(self) -> None:
        """Say that this worker writes no more."""
        self._ended.set()
        self._beating.join()
        if self.build_goes_on():
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        with suppress(FileNotFoundError):  # another worker has just finished the build
            while not self._ended.wait(BEAT_SECONDS) and self.build_goes_on():
                os.utime(self._file)


def writer_name(worker: int, rank: int, ranks: int) -> str:
    return f"{worker:03d}-{rank:05d}-of-{ranks:05d}"


def writing(cache: Path) -> list[str]:
    """The workers of a build of which there are signs, in words."""
    return [
        _describe(cache, number)
        for number in _numbers(cache)
        if _may_write(cache, number) and not _is_silent(cache, number)
    ]


def _identity(cache: Path) -> tuple[int, int] | None:
    """What tells a build's plan from that of a later build; None without one."""
    try:
        status = (cache / BUILDING / PLAN).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _file(cache: Path, number: int) -> Path:
    return cache / BUILDING / WORKERS / f"{number:03d}.json"


def _numbers(cache: Path) -> list[int]:
    with suppress(FileNotFoundError):
        names = os.listdir(cache / BUILDING / WORKERS)
        return sorted(int(name[:-5]) for name in names if name[:-5].isdigit())
    return []


def _may_write(cache: Path, number: int) -> bool:
    """Whether a worker is not known to have ended."""
    try:
        return ProcessId.read(_file(cache, number)).is_alive() is not False
    except FileNotFoundError:
        return False
    except ValueError:  # damaged: it may still be renewed
        return True


def _is_silent(cache: Path, number: int) -> bool:
    try:
        return time.time() - _file(cache, number).stat().st_mtime > STALE_SECONDS
    except FileNotFoundError:
        return True


def _describe(cache: Path, number: int) -> str:
    with suppress(FileNotFoundError, ValueError):
        process = ProcessId.read(_file(cache, number))
        return f"process {process.pid} on host {process.host}"
    return f"worker {number}"
