"""The time of a training's steps, as a run's events have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from ds_distill.process.timers import REST
from ds_distill.run.events import read_events

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
