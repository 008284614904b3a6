"""The lock of a folder: a file that names the process which writes there.

Made with O_EXCL, which is atomic on shared file systems too, where flock often is not. Its process
touches it now and then. Others look whether the file's time changes, each by its own clock: those
of two hosts may be hours apart. Whether the process is alive is asked of the system where it can
know.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ds_distill.errors import UserError
from ds_distill.files import kind_of_node, read_text
from ds_distill.process.activity import Tell
from ds_distill.process.identity import ProcessId

NAME = "lock.json"

BEAT_SECONDS = 10.0
"""Interval at which the owner touches its file."""
STALE_SECONDS = 60.0
"""After so long without a sign of its owner, a lock that is waited for is taken over."""
WATCH_SECONDS = 25.0
"""How long to look for a sign before an owner is called silent."""


class Locked(UserError):
    """Another process has the folder."""


class LockLost(Exception):
    """Another process has taken the lock: this one gave no sign for long."""


WRITE_SECONDS = 2.0
"""Time of an owner to write its name into the file that it has made."""


Time = Annotated[float, Field(ge=0, lt=2**37)]
"""Seconds since 1970, of a year that has four digits."""


@dataclass(frozen=True)
class Owner:
    """The process that has a lock."""

    process: ProcessId
    since: Time
    """When it took the lock, in seconds since 1970 by its own clock."""
    nonce: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
    """A part of a file's name, see `FolderLock._claim`."""

    @staticmethod
    def this_process() -> Owner:
        return Owner(ProcessId.of_this(), time.time(), uuid.uuid4().hex)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).isoformat(" ", "seconds")
        return f"{self.process} (since {since})"


class Signs:
    """How long files that other processes touch have not changed, by this process's own clock."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int] | None, float]] = {}

    def silent_for(self, path: Path) -> float:
        """Seconds since a file was first seen as it is now, in calls of this; 0 in the first."""
        sign, now = _sign(path), time.monotonic()
        if path not in self._seen or self._seen[path][0] != sign:
            self._seen[path] = sign, now
        return now - self._seen[path][1]


def first_sign(paths: Iterable[Path]) -> Path | None:
    """Watch files that other processes touch: the first that changes within WATCH_SECONDS."""
    before = {path: _sign(path) for path in paths}
    deadline, tell = time.monotonic() + WATCH_SECONDS, Tell()
    while before and time.monotonic() < deadline:
        files = ", ".join(map(str, before))
        tell(f"watching {files} for a sign of life, {WATCH_SECONDS:g} s at most")
        for path, sign in before.items():
            if _sign(path) not in (None, sign):
                return path
        time.sleep(min(0.2, BEAT_SECONDS / 2))
    return None


def _sign(path: Path) -> tuple[int, int] | None:
    """What a touch changes. Network file systems tell it anew only when a file is opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_ino, status.st_mtime_ns


class FolderLock:
    """The lock of one folder. A context: inside it this process has the folder."""

    def __init__(
        self,
        folder: Path,
        on_lost: Callable[[str], None] | None = None,
        *,
        what: str = "the run's folder",
        wait: bool = False,
    ) -> None:
        """
        on_lost: called, in a thread, with a sentence when the lock is no longer this process's,
            which must not write to the folder any more.
        what: the folder, in messages.
        wait: for another process that has the folder. One that has given no sign for STALE_SECONDS
            loses it, though it may go on later: see `check_held`.
        """
        self.path = folder / NAME
        self._on_lost, self._what, self._wait = on_lost, what, wait
        self._own: Owner | None = None
        self._made = False
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None
        self._signs = Signs()

    def check(self) -> None:
        """Raises Locked when another process has the folder. A lock whose process has ended for
        certain is none."""
        owner = self._read()
        if owner is None or owner.process == ProcessId.of_this():
            return
        if not self._is_over(owner):
            raise self.refusal(owner)

    def take(self) -> None:
        """Take the lock, also from a process that has ended for certain. Makes the folder.

        Raises Locked when another process has it.
        """
        own = Owner.this_process()
        self._made = not self.path.parent.exists()
        tell = Tell()
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                owner = _owner_in(self.path, patience=0)
                if owner is not None and not self._is_over(owner):
                    if not self._wait:
                        raise self.refusal(owner) from None
                    if self._signs.silent_for(self.path) < STALE_SECONDS:
                        tell(
                            f"waiting for {owner}, which has the lock of {self._what} "
                            f"{self.path.parent}, until it gives no sign for {STALE_SECONDS:g} s"
                        )
                        time.sleep(0.05)
                        continue
                self._remove(owner, own)
                continue
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(own)) + "\n")
                    file.flush()
                    os.fsync(descriptor)
            except OSError:  # a full disk
                self._free()
                raise
            break
        self._own = own
        self._sweep()
        _taken.append(self)
        self._ended.clear()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="run lock")
        self._beating.start()

    def is_held(self) -> bool:
        """Whether this process has the lock still: see `wait`."""
        return self._own is not None and _nonce(self._read()) == self._own.nonce

    def check_held(self) -> None:
        """Raises LockLost where it is not held."""
        if not self.is_held():
            raise LockLost(self.path)

    def release(self, wait: bool = True) -> None:
        """Give the folder free. Does nothing where this process does not have it.

        wait: for the thread that touches the file.
        """
        own, self._own = self._own, None
        if own is None:
            return
        self._ended.set()
        if wait and self._beating is not None:
            self._beating.join()
        _taken.remove(self)
        if _nonce(self._read()) == own.nonce:
            self._free()

    def _free(self) -> None:
        self.path.unlink(missing_ok=True)
        if self._made:
            with suppress(OSError):  # not empty: there is a run
                self.path.parent.rmdir()

    def _sweep(self) -> None:
        """Remove what a kill in `_remove` has left: records and claims of processes that have
        ended."""
        for aside in self.path.parent.glob(f".{NAME}.*"):
            owner = _owner_in(aside)
            if owner is None or self._is_over(owner):
                aside.unlink(missing_ok=True)

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()

    def _beat(self) -> None:
        """Touch the file, until the lock is released or is no longer this process's."""
        while not self._ended.wait(BEAT_SECONDS):
            try:
                owner = self._read()
                if (own := self._own) is None:
                    return
                if _nonce(owner) == own.nonce:
                    os.utime(self.path)
                    continue
            except (OSError, UserError):  # such as a file system that does not answer
                continue
            if self._on_lost is not None:
                of = f"the lock of {self.path.parent}"
                taken = f"{owner} has taken {of}" if owner is not None else f"{of} was removed"
                self._on_lost(taken)
            return

    def _read(self) -> Owner | None:
        return _owner_in(self.path)

    def _is_over(self, owner: Owner) -> bool:
        """Whether an owner's process has ended for certain."""
        if self._own is not None and owner.nonce == self._own.nonce:
            return True
        return owner.process.is_alive() is False

    def refusal(self, owner: Owner) -> Locked:
        """What to tell where an owner has the folder. Watches for a sign of one that only its own
        host could tell about."""
        if owner.process.is_alive() or first_sign([self.path]) is not None:
            return self.in_use(owner)
        host, pid = owner.process.host, owner.process.pid
        return Locked(
            f"{self._what} {self.path.parent} is locked by {owner}, which gave no sign in "
            f"{WATCH_SECONDS:g} seconds, and only its own host can tell whether it runs. Where "
            f"`ps -p {pid}` on {host} finds no such process, or {host} was started again since, "
            f"remove {self.path} and run the same command again."
        )

    def in_use(self, owner: Owner) -> Locked:
        return Locked(
            f"{self._what} {self.path.parent} is in use by {owner}. Wait for that run or stop it, "
            "or name another folder with --folder."
        )

    def _remove(self, owner: Owner | None, own: Owner) -> None:
        """Remove the file of an owner that has ended, unless another process is about to.

        Only who has the claim on that owner's file may, so that what it has found there is there
        still: of two that both found it, the second one would remove the lock of whoever has taken
        it since.
        """
        record = self.path.with_name(f".{NAME}.{uuid.uuid4().hex}")
        claim = None
        try:
            record.write_text(json.dumps(asdict(own)) + "\n", encoding="utf-8")
            claim = self._claim(record, _nonce(owner))
            if claim is None:
                time.sleep(0.01)
            elif self._is_unwritten(record) if owner is None else self._is_still(owner):
                self.path.unlink(missing_ok=True)
        finally:
            if claim is not None:
                claim.unlink(missing_ok=True)
            record.unlink(missing_ok=True)

    def _is_still(self, owner: Owner) -> bool:
        """Whether the file is that of an owner."""
        return _nonce(_owner_in(self.path, patience=0)) == owner.nonce

    def _is_unwritten(self, record: Path) -> bool:
        """Whether the file was not written to the end before a kill.

        record: written just now, so that both times are of the same clock, the file system's.
        """
        with suppress(FileNotFoundError):  # a file that is gone has no age
            age = record.stat().st_mtime - self.path.stat().st_mtime
            return age > WRITE_SECONDS and _owner_in(self.path, patience=0) is None
        return False

    def _claim(self, record: Path, nonce: str) -> Path | None:
        """The claim on the file of an owner, which one living process has at a time; None where
        another one has it. The claim of one that was killed is claimed in turn, that of one on
        another host after STALE_SECONDS: it is needed for a moment."""
        while True:
            claim = self.path.with_name(f".{NAME}.after-{nonce}")
            try:
                os.link(record, claim)
            except FileExistsError:
                other = _owner_in(claim, patience=0)
                if other is None or not (
                    self._is_over(other) or self._signs.silent_for(claim) > STALE_SECONDS
                ):
                    return None
                nonce = other.nonce
            else:
                return claim


def _nonce(owner: Owner | None) -> str:
    """Of a file that was never written to the end as well."""
    return "unwritten" if owner is None else owner.nonce


_taken: list[FolderLock] = []


def release_all() -> None:
    """Release the locks of this process, which is about to end without leaving its blocks."""
    for taken in list(_taken):
        with suppress(OSError):
            taken.release(wait=False)


_OWNER = TypeAdapter(Owner)


def _owner_in(path: Path, patience: float = WRITE_SECONDS) -> Owner | None:
    """The owner by a file; None without one, or where it was not written to the end. Raises
    UserError for what is no file.

    patience: seconds to wait for that end.
    """
    deadline = time.monotonic() + patience
    while True:
        if (kind := kind_of_node(path)) not in (None, "a file"):
            raise UserError(f"{path}: is {kind}, and a lock is a file. Remove it.")
        try:
            return _OWNER.validate_json(read_text(path), strict=True)
        except FileNotFoundError:
            return None
        except ValueError:
            if time.monotonic() > deadline:
                return None
            time.sleep(WRITE_SECONDS / 20)  # made, and about to be written
