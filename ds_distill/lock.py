"""The lock of a folder: a file that names the process which writes there.

Made with O_EXCL, which is atomic on shared file systems too, where flock often is not. Its process
renews a time in it; whether the process is alive is asked of the system where it can know.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ds_distill.errors import UserError
from ds_distill.files import kind_of_node, read_text, write_text
from ds_distill.process_id import ProcessId

NAME = "lock.json"

BEAT_SECONDS = 10.0
"""Interval at which the owner renews its time."""
STALE_SECONDS = 60.0
"""Age of that time from which its owner counts as ended, where nothing else can tell."""


class Locked(UserError):
    """Another process has the folder."""


WRITE_SECONDS = 2.0
"""Time of an owner to write its name into the file that it has made."""


Time = Annotated[float, Field(ge=0, lt=2**37)]
"""Seconds since 1970, of a year that has four digits."""


@dataclass(frozen=True)
class Owner:
    """The process that has a lock."""

    process: ProcessId
    since: Time
    """When it took the lock, in seconds since 1970."""
    nonce: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
    """A part of a file's name, see `FolderLock._claim`."""
    beat: Time
    """When it was last renewed, in seconds since 1970 by the owner's clock."""

    @staticmethod
    def this_process() -> Owner:
        now = time.time()
        return Owner(ProcessId.of_this(), now, uuid.uuid4().hex, now)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).isoformat(" ", "seconds")
        return f"process {self.process.pid} on host {self.process.host} (since {since})"


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
        on_lost: called, in a thread, with a sentence when another process has taken the lock from
            this one, which must not write to the folder any more.
        what: the folder, in messages.
        wait: for another process that has the folder, as long as there are signs of it.
        """
        self.path = folder / NAME
        self._on_lost, self._what, self._wait = on_lost, what, wait
        self._own: Owner | None = None
        self._made = False
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def check(self) -> None:
        """Raises Locked when another process has the folder. A lock whose process has ended for
        certain is none."""
        owner = self._read()
        if owner is None or owner.process == ProcessId.of_this():
            return
        if not self._is_over(owner):
            raise self._refusal(owner)

    def take(self) -> None:
        """Take the lock, also from a process that has ended for certain. Makes the folder.

        Raises Locked when another process has it.
        """
        own = Owner.this_process()
        self._made = not self.path.parent.exists()
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                owner = self._read()
                if owner is not None and not self._is_over(owner):
                    if not self._wait or _is_silent(owner):
                        raise self._refusal(owner) from None
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

    def release(self, wait: bool = True) -> None:
        """Give the folder free. Does nothing where this process does not have it.

        wait: for the thread that renews the time.
        """
        own, self._own = self._own, None
        if own is None:
            return
        self._ended.set()
        if wait and self._beating is not None:
            self._beating.join()
        _taken.remove(self)
        owner = self._read()
        if owner is not None and owner.nonce == own.nonce:
            self._free()

    def _free(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.with_name(f".{NAME}.tmp").unlink(missing_ok=True)  # of an owner before
        if self._made:
            with suppress(OSError):  # not empty: there is a run
                self.path.parent.rmdir()

    def _sweep(self) -> None:
        """Remove what a kill in `_remove` has left: records and claims of processes that have
        ended."""
        for aside in self.path.parent.glob(f".{NAME}.*"):
            if aside.suffix != ".tmp":
                owner = _owner_in(aside)
                if owner is None or self._is_over(owner):
                    aside.unlink(missing_ok=True)

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()

    def _beat(self) -> None:
        """Renew the time, until the lock is released or was taken from this process."""
        while not self._ended.wait(BEAT_SECONDS):
            own, owner = self._own, self._read()
            if own is None:
                return
            if owner is not None and owner.nonce != own.nonce:
                if self._on_lost is not None:
                    self._on_lost(f"{owner} has taken the lock of {self.path.parent}")
                return
            with suppress(OSError):  # a full disk is the run's to report
                write_text(self.path, json.dumps(asdict(replace(own, beat=time.time()))) + "\n")

    def _read(self) -> Owner | None:
        return _owner_in(self.path)

    def _is_over(self, owner: Owner) -> bool:
        """Whether an owner's process has ended for certain."""
        if self._own is not None and owner.nonce == self._own.nonce:
            return True
        return owner.process.is_alive() is False

    def _refusal(self, owner: Owner) -> Locked:
        if _is_silent(owner):
            seen = datetime.fromtimestamp(owner.beat).isoformat(" ", "seconds")
            return Locked(
                f"{self._what} {self.path.parent} is locked by {owner}, of which there has "
                f"been no sign since {seen}. If that process has ended, remove {self.path} and "
                "run the same command again."
            )
        return Locked(
            f"{self._what} {self.path.parent} is in use by {owner}. Wait for that run or stop "
            "it, or name another folder with --folder."
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
            elif self._is_still(owner):
                self.path.unlink(missing_ok=True)
        finally:
            if claim is not None:
                claim.unlink(missing_ok=True)
            record.unlink(missing_ok=True)

    def _is_still(self, owner: Owner | None) -> bool:
        """Whether the file is that of an owner; of none: one that was never written to the end."""
        if owner is None:  # a file that is gone has no age
            return self._read() is None and _age(self.path) > WRITE_SECONDS
        return _nonce(self._read()) == owner.nonce

    def _claim(self, record: Path, nonce: str) -> Path | None:
        """The claim on the file of an owner, which one living process has at a time; None where
        another one has it. The claim of one that was killed is claimed in turn."""
        while True:
            claim = self.path.with_name(f".{NAME}.after-{nonce}")
            try:
                os.link(record, claim)
            except FileExistsError:
                other = _owner_in(claim)
                if other is None or not self._is_over(other):
                    return None
                nonce = other.nonce
            else:
                return claim


def _nonce(owner: Owner | None) -> str:
    """Of a file that was never written to the end as well."""
    return "unwritten" if owner is None else owner.nonce


_taken: list[FolderLock] = []


def _is_silent(owner: Owner) -> bool:
    """Whether an owner, which may have ended on another host, has given no sign for long."""
    return owner.process.is_alive() is None and time.time() - owner.beat > STALE_SECONDS


def release_all() -> None:
    """Release the locks of this process, which is about to end without leaving its blocks."""
    for taken in list(_taken):
        with suppress(OSError):
            taken.release(wait=False)


_OWNER = TypeAdapter(Owner)


def _owner_in(path: Path) -> Owner | None:
    """The owner by a file; None without one, or where it was never written to the end. Raises
    UserError for what is no file."""
    for _ in range(20):
        if (kind := kind_of_node(path)) not in (None, "a file"):
            raise UserError(f"{path}: is {kind}, and a lock is a file. Remove it.")
        try:
            return _OWNER.validate_json(read_text(path), strict=True)
        except FileNotFoundError:
            return None
        except ValueError:
            if _age(path) > WRITE_SECONDS:
                return None
            time.sleep(WRITE_SECONDS / 20)  # made, and about to be written
    return None


def _age(path: Path) -> float:
    """Seconds since a file was last written."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
