"""The process that has a run's folder, where only its own host can tell whether it still runs.

`python -m ds_distill.launch.lock_owner` on that host reads the process from its standard input, a
line of JSON, and prints the answer as another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from ds_distill.launch.hosts import Hosts
from ds_distill.launch.ssh import ssh_command
from ds_distill.process.identity import ProcessId
from ds_distill.process.lock import FolderLock
from ds_distill.process.terminal import say

MODULE = "ds_distill.launch.lock_owner"
MARK = "ds-distill owner: "
"""Begins the answer's line: a shell's start-up files can print others."""
ANSWER_SECONDS = 60.0


def free_of_ended(folder: Path, hosts: Hosts, ssh_port: int | None) -> None:
    """Remove the lock of a run's folder whose process has ended on another one of the hosts, which
    is asked through ssh.

    hosts: of this launch. No other is asked: what a folder's file names may be anything.

    Raises Locked when that process runs, or its host cannot be asked.
    """
    lock = FolderLock(folder)
    owner = lock.owner_elsewhere()
    if owner is None:
        return
    host = owner.process.host
    if host not in hosts:
        raise lock.refusal(owner, f"{host} is none of the hosts of this launch, so it is not asked")
    say(f"Asking {host} whether {owner} still runs ...")
    runs = _ask(owner.process, ssh_command(host, MODULE, ssh_port))
    if isinstance(runs, str):
        raise lock.refusal(owner, f"{host} could not be asked whether it runs: {runs}")
    if runs:
        raise lock.in_use(owner)
    say(f"It does not: the lock of {folder} is removed.")
    lock.remove(owner)


def _ask(process: ProcessId, command: list[str]) -> bool | str:
    """Whether a process runs, or why that is not known."""
    line = json.dumps(asdict(process)) + "\n"
    try:
        done = subprocess.run(
            command, input=line, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {ANSWER_SECONDS:g} s"
    for answer in done.stdout.splitlines():
        if answer.startswith(MARK):
            runs: bool | None = json.loads(answer.removeprefix(MARK))
            elsewhere = "it was in another container there, or that host was started again since"
            return elsewhere if runs is None else runs
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def main() -> None:
    process = ProcessId.parse(sys.stdin.readline())
    print(MARK + json.dumps(process.is_alive()), flush=True)


if __name__ == "__main__":
    main()
