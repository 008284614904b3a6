"""What this process does at the moment, for those who watch it from outside.

Code that takes long calls `mark` at its steps; a watchdog reads `activity` in another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from ds_distill.process.terminal import say

Item = TypeVar("Item")

TELL_SECONDS, TELL_AGAIN_SECONDS = 5.0, 30.0
"""When a wait, or a long piece of work, is first told of, and when again."""


@dataclass(frozen=True)
class Activity:
    """Where a process is in its run."""

    marks: int = 0
    """Signs of progress so far: it grows as long as the process does."""
    position: int = 0
    """Marks that every rank makes, in the same order: the rank with the lowest is behind."""
    what: str = "starts"
    phase: str | None = None
    step: int | None = None
    """Optimizer steps done, in a training."""
    waits: bool = False
    """Whether it waits for the other ranks."""

    def __str__(self) -> str:
        phase = f"phase {self.phase}, " if self.phase is not None else ""
        step = f"step {self.step}, " if self.step is not None else ""
        return f"{phase}{step}{self.what}"


_activity = Activity()


@contextmanager
def announced(show: Callable[[str], object]) -> Iterator[None]:
    """Show a line on what this process does, for as long as this block takes."""
    ended, started, tell = threading.Event(), time.monotonic(), Tell()

    def announce() -> None:
        while not ended.wait(0.1):
            if tell.is_time():
                show(f"  {time.monotonic() - started:.0f} s: {activity()} ...")

    thread = threading.Thread(target=announce, daemon=True, name="announcer")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def activity() -> Activity:
    return _activity


_count: Callable[[int], object] | None = None


@contextmanager
def counted_by(advance: Callable[[int], object]) -> Iterator[None]:
    """Have a progress bar count the examples that `mark` says are done, in this block."""
    global _count
    before, _count = _count, advance
    try:
        yield
    finally:
        _count = before


def mark(what: str, *, everywhere: bool = False, done: int = 0) -> None:
    """A sign of progress. everywhere: whether every rank comes by, equally often. done: how many
    examples are done since the last one; see `counted_by`."""
    global _activity
    if done and _count is not None:
        _count(done)
    now = _activity
    _activity = replace(
        now, marks=now.marks + 1, position=now.position + everywhere, what=what, waits=False
    )


def marked(what: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items, each of which is a sign of progress: for loops that one rank does alone."""
    for item in items:
        mark(what)
        yield item


def mark_phase(phase: str | None) -> None:
    """A phase begins, or what is outside of phases."""
    global _activity
    _activity = replace(_activity, phase=phase, step=None)
    mark("begins", everywhere=True)


def mark_step(step: int | None) -> None:
    """A training stands at `step`; None: it has ended."""
    global _activity
    _activity = replace(_activity, step=step)


def mark_waiting(waits: bool) -> None:
    """The process waits for the other ranks, or no longer does."""
    global _activity
    _activity = replace(_activity, waits=waits, marks=_activity.marks + 1)


class Tell:
    """Prints what is waited for, when it is time to: after some seconds, and then now and again."""

    def __init__(self) -> None:
        self._next = time.monotonic() + TELL_SECONDS

    def is_time(self) -> bool:
        """Once each time."""
        now = time.monotonic()
        if now <= self._next:
            return False
        self._next = now + TELL_AGAIN_SECONDS
        return True

    def __call__(self, what: str) -> None:
        if self.is_time():
            say(f"ds-distill: {what}")
