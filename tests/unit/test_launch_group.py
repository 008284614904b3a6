"""A group of processes ends with whatever owns it. Real kills, of small processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from processes import kill_all, left_of, marked

OWNER = """
import os, sys
from ds_distill.launch.agent import watch
from ds_distill.launch.process_group import Command, Group

signals, _ = os.pipe()
grace, silence = float(sys.argv[1]), float(sys.argv[2]) or None
program, *arguments = sys.argv[3:]
commands = [[sys.executable, "-c", program, name] for name in arguments]
group = Group([Command(command, dict(os.environ)) for command in commands], grace)
sys.exit(watch(group, signals, silence))
"""

DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0 and os.fork() == 0:  # one whose parent is alive, and one more below it
    open(sys.argv[1], "w").close()
time.sleep(600)
"""

POLITE = """
import os, signal, sys, time
def save(*_):
    open(sys.argv[1] + ".saved", "w").close()
    os._exit(75)
signal.signal(signal.SIGTERM, save)
if os.fork() == 0:  # Python forgets signals that reach a child within its fork
    open(sys.argv[1], "w").close()
while True:
    time.sleep(600)
"""

ORPHANS = """
import os, sys, time
if os.fork() == 0:
    open(sys.argv[1], "w").close()
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(7)
"""

Start = Callable[..., "Owner"]


class Owner:
    """A process that owns a group, and everything below it."""

    def __init__(self, folder: Path, program: str, grace: float, silence: float) -> None:
        self.ready = folder / "ready"
        self.environment = {**os.environ, **marked()}
        command = [sys.executable, "-c", OWNER, str(grace), str(silence), program, str(self.ready)]
        self.process = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, bufsize=0
        )

    def await_start(self) -> None:
        deadline = time.monotonic() + 60
        while not self.ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)

    def guard(self) -> psutil.Process:
        [guard] = psutil.Process(self.process.pid).children()
        return guard

    def left(self, seconds: float) -> list[psutil.Process]:
        """What runs after so many seconds, or []."""
        deadline = time.monotonic() + seconds
        while (left := left_of(self.environment)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    owners: list[Owner] = []

    def begin(program: str, grace: float = 0.5, silence: float = 0.0) -> Owner:
        owners.append(Owner(tmp_path, program, grace, silence))
        owners[-1].await_start()
        return owners[-1]

    yield begin
    for owner in owners:
        for process in left_of(owner.environment):
            process.kill()
        kill_all(owner.process)  # type: ignore[arg-type]


def test_the_end_of_the_input_ends_all(start):
    owner = start(DEAF)
    assert len(left_of(owner.environment)) == 5
    owner.process.stdin.close()
    assert owner.left(seconds=20) == []
    assert owner.process.wait() == 137


@pytest.mark.parametrize("victim", ["owner", "guard", "command"])
def test_each_can_be_killed_and_the_rest_ends(victim, start):
    owner = start(DEAF)
    guard = owner.guard()
    [command] = guard.children()
    number = {"owner": owner.process.pid, "guard": guard.pid, "command": command.pid}[victim]
    os.kill(number, signal.SIGKILL)
    assert owner.left(seconds=20) == []
    assert owner.process.wait() == {"owner": -9, "guard": 137, "command": 137}[victim]


def test_a_stopped_process_ends_too(start):
    """It heeds no SIGTERM and does not notice that its input ends."""
    owner = start(POLITE, grace=0.5)
    [command] = owner.guard().children()
    command.suspend()
    owner.process.kill()
    assert owner.left(seconds=20) == []


def test_sigterm_comes_first(start):
    owner = start(POLITE, grace=60)
    begun = time.monotonic()
    owner.process.stdin.write(b"stop\n")
    assert owner.left(seconds=40) == [] and time.monotonic() - begun < 40
    assert owner.ready.with_name("ready.saved").exists()
    assert owner.process.wait() == 75


def test_a_slow_guard_still_tells_the_exit_code(start):
    owner = start(POLITE, grace=60)
    guard = owner.guard()
    guard.suspend()
    owner.process.stdin.write(b"stop\n")
    deadline = time.monotonic() + 30
    while not owner.ready.with_name("ready.saved").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    assert owner.process.poll() is None
    guard.resume()
    assert owner.process.wait(timeout=30) == 75


def test_a_second_order_does_not_wait_for_the_grace(start):
    owner = start(DEAF, grace=600)
    owner.process.stdin.write(b"stop\n")
    time.sleep(0.5)
    assert owner.process.poll() is None
    owner.process.stdin.write(b"kill\n")
    assert owner.left(seconds=20) == []


def test_kill_does_not_begin_with_sigterm(start):
    owner = start(POLITE, grace=600)
    owner.process.stdin.write(b"kill\n")
    assert owner.left(seconds=20) == []
    assert not owner.ready.with_name("ready.saved").exists()


def test_what_outlives_the_command_ends_with_it(start):
    owner = start(ORPHANS)
    assert owner.process.wait(timeout=20) == 7
    assert owner.left(seconds=5) == []


FAILS = (
    """
import os, sys, time
name = sys.argv[1]
while name.endswith("bad") and not os.path.exists(name[:-3]):
    time.sleep(0.01)
if name.endswith("bad"):
    sys.exit(7)
"""
    + POLITE
)


def test_the_first_that_fails_ends_the_others(tmp_path):
    environment = {**os.environ, **marked()}
    names = [str(tmp_path / "other"), str(tmp_path / "otherbad")]
    command = [sys.executable, "-c", OWNER, "60", "0", FAILS, *names]
    owner = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    assert owner.wait(timeout=60) == 7
    assert left_of(environment) == []
    assert (tmp_path / "other.saved").exists()


def test_silence_ends_all_and_signs_of_life_do_not(start):
    owner = start(DEAF, grace=0.1, silence=2.0)
    for _ in range(12):
        owner.process.stdin.write(b"\n")
        time.sleep(0.25)
    assert owner.process.poll() is None
    assert owner.left(seconds=20) == []
    assert owner.process.wait() == 137
