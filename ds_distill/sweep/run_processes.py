"""The processes of a sweep's runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from ds_distill.errors import UserError
from ds_distill.process.launcher import ends_with, shell_code
from ds_distill.process.signals import STOPPED

TELLS_EVERY = 60
"""Seconds between lines that say what runs."""

GRACE = 20
"""Seconds that runs have to end, all the same ones, after they were told to."""


@dataclass(frozen=True)
class Child:
    """A run, by the command that does it."""

    name: str
    arguments: tuple[str, ...]
    """Of `ds-distill`."""
    log: Path
    """What it prints."""


class Pool:
    """Runs children side by side. They end when this process does."""

    def __init__(self, jobs: int, gpus: Sequence[str] = (), ranks: int | None = None) -> None:
        """
        jobs: how many at once. They share the cores; where there are GPUs each has one.
        gpus: as CUDA_VISIBLE_DEVICES names them.
        ranks: of each child, which is a launch then; see `launches_at_once`.
        """
        self.jobs, self.gpus, self.ranks = jobs, gpus, ranks
        self._running: dict[int, tuple[Child, subprocess.Popen[bytes]]] = {}
        self._ends, self._starts = False, threading.RLock()

    def run(
        self, children: Sequence[Child], waiting: Callable[[list[Child]], None]
    ) -> Generator[tuple[Child, int, float]]:
        """(child, exit code, seconds) as each ends. waiting: called with those that run, where none
        has ended for TELLS_EVERY seconds."""
        slots = SimpleQueue[int]()
        for slot in range(self.jobs):
            slots.put(slot)
        with ThreadPoolExecutor(self.jobs) as threads:
            left = {threads.submit(self._run, child, slots) for child in children}
            try:
                while left:
                    done, left = wait(left, TELLS_EVERY, FIRST_COMPLETED)
                    if not done:
                        waiting([child for child, _ in [*self._running.values()]])
                    yield from (each.result() for each in done)
            finally:
                if left:  # a mistake of ours: the threads would see the others through
                    self.end(at_once=True)

    def _run(self, child: Child, slots: SimpleQueue[int]) -> tuple[Child, int, float]:
        slot, began = slots.get(), time.monotonic()
        with self._starts, open(child.log, "ab") as log:
            if self._ends:
                slots.put(slot)
                return child, STOPPED, 0.0
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ds_distill", *child.arguments],
                env=self.environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=ends_with(os.getpid()),  # and when this thread does, which waits
            )
            self._running[slot] = child, process
        code = shell_code(process.wait())
        del self._running[slot]
        slots.put(slot)
        return child, code, time.monotonic() - began

    def environment(self, slot: int) -> dict[str, str]:
        """Of the child that runs in a slot, from 0 to `jobs` - 1."""
        environment = dict(os.environ)
        each = self.ranks or 1
        if self.gpus:
            first = slot * each % len(self.gpus)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[first : first + each])
        if self.jobs > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // (self.jobs * each))
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        return environment

    def end(self, at_once: bool) -> bool:
        """End what runs, and say whether a run has saved its work; see `exit_on_signal`."""
        with self._starts:
            self._ends = True
        running = [process for _, process in [*self._running.values()]]
        until = time.monotonic() + (0 if at_once else GRACE)
        if not at_once:  # all of them first: each trains on until it is asked
            for process in running:
                process.terminate()
        return STOPPED in [_code_at(process, until) for process in running]


def _code_at(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Of a process that was asked to end; None for one that is killed, then."""
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def launches_at_once(jobs: int, ranks: int, gpus: Sequence[str]) -> int:
    """How many launches of so many ranks run side by side: up to `jobs`, no more than have a GPU
    for each rank, or without GPUs a core.

    Raises UserError where there are GPUs, and too few for one.
    """
    if gpus and ranks > len(gpus):
        raise UserError(
            f"--num-gpus {ranks}: each run would have so many ranks, and this machine has "
            f"{len(gpus)} GPUs. Give a smaller number."
        )
    return max(1, min(jobs, len(gpus or os.sched_getaffinity(0)) // ranks))


def last_phase(log: Path) -> str:
    """The last line of a run's output that begins a phase, such as `[2/6] distil`."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.startswith("[") and "/" in line), "")
