"""Where a training's time goes: seconds of named parts, each without the parts inside it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

REST = "other"
"""What no part has."""

_MOST_MARKS = 10_000
"""At which they are added up, though nothing was asked: events take memory."""


class Timers:
    """Seconds of parts since the last reading.

    On a GPU they are those between events on its stream, which nothing waits for before a reading:
    where the GPU waits for Python, the part that is slow to start kernels has the time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open = [REST]
        self._seconds: dict[str, float] = {}
        self._marks: list[tuple[str, Any]] = []
        """(part that goes on from there, time or event), in order, of what is not in `_seconds`."""
        self._mark()

    def begin(self, part: str) -> None:
        self._open.append(part)
        self._mark()

    def end(self) -> None:
        self._open.pop()
        self._mark()

    def read(self) -> dict[str, float]:
        """Seconds of each part, in the order in which they were first there, REST last. Together
        they are the time since the last reading. Waits for the device."""
        self._mark()
        self._add_marks()
        seconds, self._seconds = self._seconds, {}
        seconds[REST] = seconds.pop(REST, 0.0)
        return seconds

    def _add_marks(self) -> None:
        marks, self._marks = self._marks, self._marks[-1:]
        if self._on_gpu:
            marks[-1][1].synchronize()
        for (part, start), (_, stop) in pairwise(marks):
            between = start.elapsed_time(stop) / 1000 if self._on_gpu else stop - start
            self._seconds[part] = self._seconds.get(part, 0.0) + between

    def _mark(self) -> None:
        now: Any
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((self._open[-1], now))
        if len(self._marks) > _MOST_MARKS:
            self._add_marks()


_timers: Timers | None = None


@contextmanager
def timing(timers: Timers) -> Iterator[None]:
    """Inside this block `timed` counts for these timers."""
    global _timers
    before, _timers = _timers, timers
    try:
        yield
    finally:
        _timers = before


@contextmanager
def timed(part: str) -> Iterator[None]:
    """The block is part `part` of what is timed; of nothing, where nothing is."""
    if _timers is None:
        yield
        return
    timers = _timers
    timers.begin(part)
    try:
        yield
    finally:
        timers.end()


def timed_each(part: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items, each of which is made in part `part`."""
    making = iter(items)
    while True:
        with timed(part):
            try:
                item = next(making)
            except StopIteration:
                return
        yield item
