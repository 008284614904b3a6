"""The lease of a folder: which process writes there.

It is filelock's SoftFileLease, a file that names its process, which touches it now and then. That
of a process of this machine that has ended is free at once, that of any other one after
LEASE_SECONDS without a touch, by the clock of the one who looks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import LeaseCompromise, LeaseSettingsMismatch, OwnerRecord, SoftFileLease, Timeout

from ds_distill import files
from ds_distill.errors import UserError
from ds_distill.process.activity import Tell, mark
from ds_distill.process.identity import born

NAME = "lock"

LEASE_SECONDS = 120.0
"""After so long without a touch a process has lost its folder, though it may go on later."""
MARGIN_SECONDS = 5.0
"""For filelock, which looks now and then, to take what is free."""


class Locked(UserError):
    """Another process has the folder."""


@contextmanager
def leased(folder: Path, on_lost: Callable[[str], None], *, waits: bool = False) -> Iterator[None]:
    """Inside this block this process has the folder, which is made where it is not there.

    on_lost: called with a sentence when another process has taken the folder: by the lease's
        thread, and before anything is published. It ends the process.
    waits: for another one's lease to end, twice LEASE_SECONDS at most.

    Raises Locked where another process has the folder.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lease = _lease(folder, lambda why: on_lost(_lost(folder, why.reason)))
    _acquire(lease, folder, waits)
    token = lease.token

    def check() -> None:
        owner = lease.owner
        if owner is not None and owner.token != token:
            on_lost(_lost(folder, "owner-changed"))
        elif owner is None and not (folder / NAME).exists():
            on_lost(_lost(folder, "marker-missing"))

    _held.append(lease)
    files.guards.append(check)
    try:
        yield
    finally:
        files.guards.remove(check)
        _held.remove(lease)
        lease.release()
        if made:
            with suppress(OSError):  # not empty: there is a run
                folder.rmdir()


def check_free(folder: Path) -> None:
    """Raises Locked where another process has the folder."""
    lease = _lease(folder)
    if not (folder / NAME).is_file() or lease.is_lock_held_by_us:
        return
    try:
        _try(lease)
    except (Timeout, LeaseSettingsMismatch, PermissionError):
        raise _refusal(lease, folder) from None
    lease.release()


def release_all() -> None:
    """Release the leases of this process, which is about to end without leaving its blocks."""
    for lease in _held:
        with suppress(OSError):
            lease.release()


_held: list[SoftFileLease] = []

_FIRST = 0xEFFFFFFC
"""Of a machine's own space of process ids, which filelock does not write beside the host."""


def _lease(folder: Path, on_lost: Callable[[LeaseCompromise], None] | None = None) -> SoftFileLease:
    duration, path = LEASE_SECONDS, folder / NAME
    return SoftFileLease(path, lease_duration=duration, on_compromise=on_lost, thread_local=False)


def _acquire(lease: SoftFileLease, folder: Path, waits: bool) -> None:
    """Raises Locked."""
    since = began = time.monotonic()
    sign, tell = None, Tell()
    while True:
        with suppress(Timeout, LeaseSettingsMismatch):
            _try(lease)
            return
        now, last = time.monotonic(), sign
        if (sign := _sign(folder / NAME)) != last:
            since = now
        if not waits or now - began > 2 * LEASE_SECONDS:
            raise _refusal(lease, folder)
        if now - since > LEASE_SECONDS + MARGIN_SECONDS:
            # filelock has not taken it: NFS does not exchange two names, as it would.
            lease.force_break()
        who = _holder(lease)
        tell(f"waiting for {who}, which has {folder}, at most {2 * LEASE_SECONDS:g} s")
        mark("waits for the run's folder")
        time.sleep(0.05)


def _try(lease: SoftFileLease) -> None:
    """Raises Timeout where another process has it."""
    owner = lease.owner
    if owner is not None and _has_ended(owner):
        lease.force_break()
    lease.acquire(blocking=False)


def _has_ended(owner: OwnerRecord) -> bool:
    """Whether it is a process of this machine that has ended. filelock takes one that nobody has
    waited for, as in a container without an init, for a living one."""
    host, _, space = owner.hostname.partition("?pidns-")
    own = os.stat("/proc/self/ns/pid").st_ino
    is_here = host == socket.gethostname() and space == ("" if own == _FIRST else f"{own:x}")
    return is_here and born(owner.pid) is None


def _sign(path: Path) -> tuple[int, int] | None:
    """What a touch changes."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_mtime_ns
    return None


def _holder(lease: SoftFileLease) -> str:
    owner = lease.owner
    if owner is None:
        return "a process that its file does not name"
    return f"process {owner.pid} on host {owner.hostname.partition('?')[0]}"


def _refusal(lease: SoftFileLease, folder: Path) -> Locked:
    return Locked(
        f"the run's folder {folder} is in use by {_holder(lease)}. Wait for that run or stop it, "
        "or name another folder with --folder. Where it has ended on another machine, "
        f"--resume=auto waits until the folder is free; or remove {lease.lock_file}."
    )


def _lost(folder: Path, reason: str) -> str:
    if reason == "marker-missing":
        return f"the lock of {folder} was removed"
    if reason == "refresh-failed":
        return f"the lock of {folder} could not be kept"
    return f"another process has taken {folder}"
