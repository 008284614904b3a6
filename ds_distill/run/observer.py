"""What a run does beside training while it is profiled (`profiling/`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import torch

from ds_distill.process.peak_memory import forget_resident_peak, resident_peak
from ds_distill.process.timers import REST, Timers
from ds_distill.run.events import read_events
from ds_distill.types import Batch


@dataclass(frozen=True)
class Amount:
    """What a model reads in some steps, on this rank."""

    examples: int = 0
    tokens: int = 0
    """Without padding."""
    squares: int = 0
    """Sum of the examples' tokens squared: attention's work grows with it."""
    rows: int = 0
    """Rows of its head: masked tokens, or examples."""

    def __add__(self, other: Amount) -> Amount:
        both = zip(astuple(self), astuple(other), strict=True)
        return Amount(*(one + more for one, more in both))


@dataclass
class Training:
    """What was observed of one model's training."""

    amounts: dict[int, dict[str, Amount]] = field(default_factory=dict)
    """By step, counted from 0, and by model."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes that torch had allocated on the GPU, by part; none on a CPU."""
    resident: int | None = None
    """Most bytes of this process, where it trains on a CPU and the system tells."""
    last: dict[str, float] = field(default_factory=dict)
    """Seconds by part after its last report."""


class Observer:
    """Observes the trainings of a run."""

    def __init__(self, begins: Callable[[], None] = lambda: None) -> None:
        """begins: called before the first training."""
        self.trainings: dict[tuple[int, str], Training] = {}
        """By the phase's number and the model that is trained."""
        self._begins = begins
        self._current: tuple[Training, Timers] | None = None

    def start(self, training: tuple[int, str], device: torch.device) -> Timers:
        """A training begins, named by its phase's number and its model. Returns its timers."""
        if not self.trainings:
            self._begins()
        self.trainings[training] = observed = Training()
        if device.type == "cuda":
            timers: Timers = _PeakTimers(device, observed.peaks)
        else:
            timers = Timers(device)
            forget_resident_peak()
        self._current = observed, timers
        return timers

    def batches(self, training: tuple[int, str], step: int, micro_batches: Sequence[Batch]) -> None:
        """What this rank's models will read in a step."""
        found: dict[str, Amount] = {}
        for batch in micro_batches:
            for name, amount in _amounts(batch).items():
                found[name] = found.get(name, Amount()) + amount
        self.trainings[training].amounts[step] = found

    def after_step(self) -> None:
        """A step has ended."""

    def end(self) -> None:
        """The training has ended."""
        assert self._current is not None
        observed, timers = self._current
        observed.last = timers.read()
        if not isinstance(timers, _PeakTimers):
            observed.resident = resident_peak()


class _PeakTimers(Timers):
    """Timers that note the most memory of a GPU in each part, too."""

    def __init__(self, device: torch.device, peaks: dict[str, int]) -> None:
        self._peaks = peaks
        super().__init__(device)

    def begin(self, part: str) -> None:
        self._note()
        super().begin(part)

    def end(self) -> None:
        self._note()
        super().end()

    def _note(self) -> None:
        part = self._open[-1]
        self._peaks[part] = max(self._peaks.get(part, 0), allocated_peak())


def _amounts(batch: Batch) -> Mapping[str, Amount]:
    found = {}
    for name, view in batch.views.items():
        lengths = np.array([len(tokens) for tokens in view.tokens()], dtype=np.int64)
        rows = len(lengths) if view.positions is None else len(view.positions)
        found[name] = Amount(len(lengths), int(lengths.sum()), int((lengths**2).sum()), rows)
    return found


def allocated_peak() -> int:
    """Bytes of torch's allocator on the GPU, the most since one asked."""
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


BESIDE = ("report", "validation", "checkpoint")
"""Parts that are not in every step."""


@dataclass(frozen=True)
class Timings:
    """Of one training on rank 0, without the steps in which a process warms up."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    """`timing` of each event: how many steps, and the seconds of all of them by part."""

    @property
    def steps(self) -> int:
        return sum(sample["steps"] for sample in self.samples)

    @property
    def seconds(self) -> dict[str, float]:
        """Of a step, by part: means. REST is last."""
        total = self._total()
        parts = [part for part in total if part not in (*BESIDE, REST)]
        return {part: total[part] / self.steps for part in [*parts, REST]}

    @property
    def beside(self) -> dict[str, float]:
        """Of what is not in every step, all together."""
        total = self._total()
        return {part: total[part] for part in BESIDE if part in total}

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds of a step: first and third quartile over samples."""
        each = [sum(Timings([sample]).seconds.values()) for sample in self.samples]
        if len(each) < 2:
            return each[0], each[0]
        first, _, third = quantiles(each, n=4, method="inclusive")
        return first, third

    def _total(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for sample in self.samples:
            for part, seconds in sample["seconds"].items():
                total[part] = total.get(part, 0.0) + seconds
        return total


def read_timings(metrics: Path) -> dict[tuple[int, str], Timings]:
    """By the phase's number and the model that is trained; of metrics.jsonl."""
    found: dict[tuple[int, str], Timings] = {}
    for _, event in read_events(metrics):
        if event["event"] == "train" and "timing" in event:
            training = found.setdefault((event["number"], event["phase"]), Timings())
            training.samples.append(event["timing"])
    return found
