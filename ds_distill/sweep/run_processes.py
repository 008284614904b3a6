"""The processes of a sweep's runs."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_distill.errors import UserError
from ds_distill.launch.process_group import Command, Group
from ds_distill.process.machine import named_gpus
from ds_distill.process.signals import STOPPED

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
        self._running: dict[int, tuple[Child, Group, float]] = {}

    def run(
        self, children: Sequence[Child], waiting: Callable[[list[Child]], None]
    ) -> Iterator[tuple[Child, int, float]]:
        """(child, exit code, seconds) as each ends. waiting: called each second with those that
        run."""
        left = list(children)
        while left or self._running:
            while left and len(self._running) < self.jobs:
                slot = next(number for number in range(self.jobs) if number not in self._running)
                child = left.pop(0)
                self._running[slot] = child, self._start(child, slot), time.monotonic()
            handles = {group.handle: slot for slot, (_, group, _) in self._running.items()}
            ended, _, _ = select.select(list(handles), [], [], 1.0)
            for handle in ended:
                child, group, started = self._running.pop(handles[handle])
                yield child, group.end(), time.monotonic() - started
            waiting([child for child, _, _ in self._running.values()])

    def _start(self, child: Child, slot: int) -> Group:
        arguments = [sys.executable, "-P", "-m", "ds_distill", *child.arguments]
        return Group([Command(arguments, self.environment(slot), str(child.log))], GRACE)

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
        codes = []
        if not at_once:  # all of them first: each trains on until it is asked
            for _, group, _ in self._running.values():
                group.ask()
        while self._running:
            slot, (_, group, _) = next(iter(self._running.items()))
            codes.append(group.end(at_once))
            del self._running[slot]  # a second signal ends those that are left
        return STOPPED in codes


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none on a machine without, or for CPU ranks."""
    if (named := named_gpus()) is not None:
        return named
    import torch  # seconds

    return [str(number) for number in range(torch.cuda.device_count())]


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
