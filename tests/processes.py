"""Processes under test and the logs that they leave."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from warm import Fork

Process = subprocess.Popen[str]
MARK = "DS_DISTILL_TEST_MARK"


def ended(
    *command: object, code: int = 0, timeout: float | None = 300, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command, which must end with `code`; what it prints is captured."""
    given = [*map(str, command)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=timeout, **how)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def python(source: str, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run source in a Python of its own."""
    return ended(sys.executable, "-c", source, *arguments, **how)


def marked() -> dict[str, str]:
    """An addition to the environment of processes by which `left_of` finds them."""
    return {MARK: uuid.uuid4().hex}


def left_of(environment: dict[str, str]) -> list[psutil.Process]:
    """Processes that were started with a marked environment, or by these, and have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mark = process.environ().get(MARK)
            if mark == environment[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def within(seconds: float, until: Callable[[], object]) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + seconds
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def prepare(terminal: int | None = None) -> None:
    """In a new process of a new session: it heeds SIGINT, also where this one ignores it, and has
    a terminal, if one is given."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if terminal is not None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def read_all(terminal: int, shown: list[bytes]) -> None:
    """What a terminal shows, until its other side is closed."""
    with suppress(OSError):
        while part := os.read(terminal, 65536):
            shown.append(part)


def kill_all(process: Process | Fork) -> None:
    """SIGKILL to a process and all below it, also where the launcher made groups of its own."""
    with suppress(psutil.NoSuchProcess):
        if process.poll() is None:
            everyone = [*psutil.Process(process.pid).children(recursive=True), process]
            for one in everyone:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
    process.communicate()


def events(folder: Path) -> list[dict[str, Any]]:
    """What happened so far, by a run's folder."""
    found = []
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.is_file() else []:
        with suppress(json.JSONDecodeError):  # being written
            found.append(json.loads(line))
    return found


def fork(work: Callable[[], None]) -> int:
    """Do work in a child, which ends with 0, or with 1 after an error. Returns its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child
