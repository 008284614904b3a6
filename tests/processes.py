"""Processes under test and the logs that they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process and all below it, also where the launcher made groups of its own."""
    if process.poll() is None:
        everyone = [*psutil.Process(process.pid).children(recursive=True), process]
        for one in everyone:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    process.communicate()


def events(folder: Path) -> list[dict[str, Any]]:
    """What a run's folder says happened so far."""
    found = []
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.is_file() else []:
        with suppress(json.JSONDecodeError):  # being written
            found.append(json.loads(line))
    return found
