"""The lock of a folder: between real processes, some of which are killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ds_distill.errors import UserError
from ds_distill.process import lock
from ds_distill.process.lock import FolderLock

HOLD = """
import os, sys
from pathlib import Path
from ds_distill.process import lock
lock.BEAT_SECONDS = 0.05

def lost(why):
    print("lost:", why.split(" on host")[0], flush=True)
    os._exit(1)

with lock.FolderLock(Path(sys.argv[1]), lost):
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Start a process that takes a folder's lock."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def edit(folder: Path, **changes: object) -> None:
    path = folder / lock.NAME
    before = json.loads(path.read_text())
    process = {name: changes.pop(name) for name in list(changes) if name in before["process"]}
    path.write_text(json.dumps({**before, **changes, "process": {**before["process"], **process}}))


def test_the_second_is_refused_and_goes_on_after_the_first(hold, tmp_path):
    folder = tmp_path / "run"
    first = hold(folder)
    for attempt in (FolderLock(folder).check, FolderLock(folder).take):
        with pytest.raises(UserError, match=rf"in use by process {first.pid} on host \S+ \(since"):
            attempt()
    first.communicate("", timeout=30)
    assert not folder.exists(), "nothing was written there"
    folder.mkdir()
    with FolderLock(folder):
        with pytest.raises(UserError, match=f"process {os.getpid()} on host"):
            FolderLock(folder).take()
        FolderLock(folder).check()  # this process has it
        assert [path.name for path in folder.iterdir()] == [lock.NAME]
    assert list(folder.iterdir()) == []


def test_after_a_kill_the_lock_is_free(hold, tmp_path):
    first = hold(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    FolderLock(tmp_path).check()
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / lock.NAME).read_text())["process"]["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_process_id_that_was_given_again_is_another_process(hold, tmp_path):
    hold(tmp_path)
    edit(tmp_path, born=1)
    FolderLock(tmp_path).check()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a minute takes a second."""
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.5)
    monkeypatch.setattr(lock, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)


def clock_of(folder: Path, hours: float) -> None:
    """The owner's host, or its file server, has another time."""
    at = time.time() + 3600 * hours
    os.utime(folder / lock.NAME, (at, at))


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_on_another_machine_the_signs_tell_and_no_clock(hours, hold, tmp_path, soon):
    first = hold(tmp_path)
    edit(tmp_path, machine="another", host="node-7", since=time.time() + 3600 * hours)
    with pytest.raises(UserError, match=r"in use by process .* on host node-7"):
        FolderLock(tmp_path).take()
    first.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    clock_of(tmp_path, hours)
    with pytest.raises(UserError, match=r"gave no sign in 0\.5 seconds") as caught:
        FolderLock(tmp_path).take()
    assert f"`ps -p {first.pid}` on node-7" in str(caught.value)
    assert f"remove {tmp_path / lock.NAME}" in str(caught.value)
    (tmp_path / lock.NAME).unlink()
    with FolderLock(tmp_path):
        first.send_signal(signal.SIGCONT)
        assert first.stdout is not None
        assert first.stdout.readline() == f"lost: process {os.getpid()}\n"
        assert json.loads((tmp_path / lock.NAME).read_text())["process"]["pid"] == os.getpid()


def test_who_loses_the_lock_by_hand_is_told(hold, tmp_path):
    first = hold(tmp_path)
    (tmp_path / lock.NAME).unlink()
    assert first.stdout is not None
    assert first.stdout.readline() == f"lost: the lock of {tmp_path} was removed\n"


def test_a_file_that_a_kill_left_empty_is_no_lock(tmp_path):
    (tmp_path / lock.NAME).touch()
    with FolderLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_left_empty_long_ago_is_not_waited_for(tmp_path, monkeypatch):
    """Or kills that come faster than the wait would never let anybody have the lock."""
    (tmp_path / lock.NAME).touch()
    before = time.time() - lock.WRITE_SECONDS - 1
    os.utime(tmp_path / lock.NAME, (before, before))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with FolderLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        *({"since": odd} for odd in (1e300, -1e20, math.nan, "x", None)),
        *({"nonce": odd} for odd in ("../../x", "a\0", 3, "a" * 300, "")),
        *({"process": odd} for odd in (None, [], {}, {"host": 1, "pid": "1/../2"})),
        {"since": 10**400},
    ],
)
def test_odd_fields_are_no_owner(change, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WRITE_SECONDS", 0.0)
    content = {**asdict(lock.Owner.this_process()), **change}
    (tmp_path / lock.NAME).write_text(json.dumps(content))
    FolderLock(tmp_path).check()
    with FolderLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a folder"])
def test_what_is_no_file_is_refused_at_once(kind, tmp_path):
    file = tmp_path / lock.NAME
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a link":
        file.symlink_to("not there")
    else:
        file.mkdir()
    for act in (FolderLock(tmp_path).check, FolderLock(tmp_path).take):
        with pytest.raises(UserError, match=rf"lock\.json: is {kind}"):
            act()


def test_one_that_waits_has_the_lock_after_the_first(hold, tmp_path):
    first = hold(tmp_path)
    waiting = FolderLock(tmp_path, what="cache", wait=True)
    threading.Timer(0.3, first.kill).start()
    at = time.monotonic()
    with waiting:
        assert time.monotonic() - at > 0.2


@pytest.mark.parametrize("hours", [-1, 1])
def test_one_that_waits_takes_the_lock_of_a_silent_one(hours, hold, tmp_path, soon):
    """Killed on another host, or frozen on this one."""
    for frozen in (False, True):
        first = hold(tmp_path)
        first.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        if not frozen:
            edit(tmp_path, machine="another", host="node-7")
        clock_of(tmp_path, hours)
        at = time.monotonic()
        with FolderLock(tmp_path, what="cache", wait=True) as taken:
            assert 0.9 < time.monotonic() - at < 10
            first.send_signal(signal.SIGCONT)
            assert first.stdout is not None
            assert first.stdout.readline() == f"lost: process {os.getpid()}\n"
            assert taken.is_held()
        first.wait()


def test_one_that_waits_does_not_take_the_lock_of_one_that_gives_signs(hold, tmp_path, soon):
    first = hold(tmp_path)
    edit(tmp_path, machine="another", host="node-7")
    threading.Timer(3.0, lambda: (tmp_path / lock.NAME).unlink()).start()
    at = time.monotonic()
    with FolderLock(tmp_path, what="cache", wait=True):
        assert time.monotonic() - at > 2.5
    first.kill()


def test_what_a_kill_leaves_aside_is_removed_where_its_owner_has_ended(hold, tmp_path):
    other, folder = tmp_path / "other", tmp_path / "folder"
    folder.mkdir()
    aside = folder / f".{lock.NAME}.1234"
    living = hold(other)
    shutil.copy(other / lock.NAME, aside)
    with FolderLock(folder):
        assert aside.exists(), "somebody may be about to put it back"
    living.kill()
    living.wait()
    with FolderLock(folder):
        assert not aside.exists()


LEAVE = """
import os, sys, time
from pathlib import Path
from ds_distill.process.lock import FolderLock, Locked
folder, inside = Path(sys.argv[1]), Path(sys.argv[2])
turns = 0
while turns < 40:
    if (child := os.fork()) == 0:
        try:
            FolderLock(folder).take()
        except Locked:
            os._exit(1)
        try:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            os._exit(2)
        time.sleep(0.002)
        inside.unlink()
        os._exit(0)  # with the lock, as after SIGKILL
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status < 2, "two processes had the lock"
    turns += status == 0
"""


def test_of_many_that_find_a_dead_owner_one_has_the_lock(tmp_path):
    command = [sys.executable, "-c", LEAVE, str(tmp_path / "run"), str(tmp_path / "inside")]
    several = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(5)]
    for process in several:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
