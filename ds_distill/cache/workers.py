"""The processes that write a build together: any number, on all hosts that share the cache's
folder. They come and go without a word to each other.

    .building/workers/NAME/process.json   the process of a worker, as long as it writes
    .building/claims/TEACHER.BLOCK        the name of the worker that writes a block

A name is drawn at random, and no other worker of any build has it: one that stood still, and goes
on in a later build of the cache, finds its folder gone and writes no more.

A claim is a symbolic link to a name: made by one worker alone, at once with its content, and
without a block of the disk. That of a worker that has ended, or gives no sign, is taken over. Where
such a worker goes on after all, a block is written twice, and the cache has it once.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from ds_distill.cache.build_plan import BUILDING, PLAN, Plan
from ds_distill.cache.shards import WORKERS, blocks_to_write
from ds_distill.files import sync, write_json
from ds_distill.process.activity import Tell
from ds_distill.process.identity import ProcessId
from ds_distill.process.lock import BEAT_SECONDS, STALE_SECONDS, Signs, first_sign

CLAIMS, PROCESS = "claims", "process.json"

AT_ONCE = 256
"""Blocks that are looked at before it is asked whether any of them can be claimed."""


class Worker:
    """This process among those that write a build; of several ranks their main process."""

    def __init__(self, cache: Path, plan: Plan, teachers: list[str]) -> None:
        """Join a build whose plan is written. In the lock of the cache's folder."""
        self._cache, self._plan = cache, plan
        self._claims = cache / BUILDING / CLAIMS
        self._may_be_unclaimed: dict[str, dict[int, None]] = {}
        self._signs, self._tell = Signs(), Tell()
        self.number = secrets.randbits(62)
        """What other ranks need to know, see `writer_name`."""
        self._name = _name(self.number)
        self.folder = cache / BUILDING / WORKERS / self._name
        """Of this worker alone, and there as long as its build is."""
        self.folder.mkdir()
        sync(self.folder.parent)
        self._file = self.folder / PROCESS
        write_json(self._file, asdict(ProcessId.of_this()), indent=None)
        self._free_claims(teachers)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="cache worker")
        self._beating.start()

    def _free_claims(self, teachers: list[str]) -> None:
        """Remove the claims of workers that have ended, on blocks that they have not written."""
        for teacher in teachers:
            for at in self._abandoned(teacher):
                self._claim_file(teacher, at).unlink(missing_ok=True)

    def build_goes_on(self) -> bool:
        """Whether the build is unfinished; there may be another one of the cache by now."""
        return (self._cache / BUILDING / PLAN).is_file() and self.folder.is_dir()

    def claim(self, teacher: str, ranks: int) -> list[int | None] | None:
        """The next blocks of a teacher, positions in `plan.blocks`, one for each rank or None.

        All are None as long as other workers write what is left. None: all blocks are written.
        """
        if not self.build_goes_on():
            return None
        assigned = self._assign(teacher, self._unclaimed(teacher), ranks, self._make)
        if any(at is not None for at in assigned):
            self._tell = Tell()
            return assigned
        left = blocks_to_write(self._cache, self._plan, teacher)
        if not left:
            return None
        # Of workers that have ended: one that joined has removed their claims, or they are there.
        assigned = self._assign(teacher, left, ranks, self._make)
        if assigned == [None] * ranks:
            assigned = self._assign(teacher, self._abandoned(teacher), ranks, self._take_over)
        if assigned == [None] * ranks:
            self.others()  # says whom it waits for
        return assigned

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
            if take(self._claim_file(teacher, at)):
                assigned[assigned.index(None)] = at
        return assigned

    def _make(self, claim: Path) -> bool:
        try:
            claim.symlink_to(self._name)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def _take_over(self, claim: Path) -> bool:
        """Two workers may do it at once; the block is written twice then."""
        aside = claim.with_name(f".{claim.name}.{self._name}")
        try:
            aside.symlink_to(self._name)
            os.replace(aside, claim)
        except FileNotFoundError:  # another worker has finished the build
            return False
        return True

    def _abandoned(self, teacher: str) -> list[int]:
        """Blocks that a worker has claimed, and has not written, which writes no more."""
        found = {
            at
            for at in blocks_to_write(self._cache, self._plan, teacher)
            if (owner := self._owner(teacher, at)) is not None and self._is_over(owner)
        }
        if not found:
            return []
        # Once more: it may have written them, and ended, since the journals were read.
        return [at for at in blocks_to_write(self._cache, self._plan, teacher) if at in found]

    def _owner(self, teacher: str, at: int) -> str | None:
        """The name of the worker that has claimed a block, if one has."""
        try:
            return os.readlink(self._claim_file(teacher, at))
        except FileNotFoundError:
            return None

    def _is_over(self, owner: str) -> bool:
        return owner != self._name and not self._writes(owner)

    def _writes(self, name: str) -> bool:
        """Whether there are signs of another worker, since this one first asked for it."""
        file = _file(self._cache, name)
        return _runs(file) is not False and self._signs.silent_for(file) < STALE_SECONDS

    def _claim_file(self, teacher: str, at: int) -> Path:
        return self._claims / f"{teacher}.{at:08d}"

    def others(self) -> list[str]:
        """The other workers that write, in words."""
        if not self.build_goes_on():
            return []
        found = [
            _describe(_file(self._cache, name))
            for name in _names(self._cache)
            if name != self._name and self._writes(name)
        ]
        self._announce(found)
        return found

    def _announce(self, others: list[str]) -> None:
        """Say whom this worker waits for, where that takes long."""
        if others:
            self._tell(
                f"waiting for blocks that {', '.join(others)} writes, until it gives no sign for "
                f"{STALE_SECONDS:g} s"
            )

    def close(self) -> None:
        """Say that this worker writes no more."""
        self._ended.set()
        self._beating.join()
        self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # another worker has finished the build, or the disk is slow
                os.utime(self._file)


def writer_name(worker: int, rank: int) -> str:
    """The name of one of a worker's ranks, for `ShardWriter`. worker: its number."""
    return f"{_name(worker)}/{rank:05d}"


def writing(cache: Path) -> list[str]:
    """Workers of a build that run, in words: those that are known to, else one of which there is a
    sign within WATCH_SECONDS."""
    runs = {file: _runs(file) for file in (_file(cache, name) for name in _names(cache))}
    running = [file for file, known in runs.items() if known]
    unknown = [file for file, known in runs.items() if known is None]
    if not running and (sign := first_sign(unknown)) is not None:
        running = [sign]
    return [_describe(file) for file in running]


def _name(worker: int) -> str:
    return f"{worker:016x}"


def _file(cache: Path, name: str) -> Path:
    return cache / BUILDING / WORKERS / name / PROCESS


def _names(cache: Path) -> list[str]:
    """Of the workers that have not said that they write no more."""
    with suppress(FileNotFoundError):
        names = os.listdir(cache / BUILDING / WORKERS)
        return sorted(name for name in names if _file(cache, name).is_file())
    return []


def _runs(file: Path) -> bool | None:
    """Whether a worker does, by its file; None where that is not known."""
    try:
        return ProcessId.read(file).is_alive()
    except FileNotFoundError:
        return False
    except ValueError:  # damaged: it may still be renewed
        return None


def _describe(file: Path) -> str:
    with suppress(FileNotFoundError, ValueError):
        return str(ProcessId.read(file))
    return f"worker {file.parent.name}"
