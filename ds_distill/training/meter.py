"""Losses and speed of a training between two reports."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from ds_distill.engine.config import STEPS_AHEAD
from ds_distill.engine.world import World
from ds_distill.process.timers import Timers
from ds_distill.run.observer import BESIDE

WARM_UP_STEPS = STEPS_AHEAD
"""First steps of a process, left out of throughput: caches and allocators are cold. As many as
teachers read at once, so that whole windows are counted."""


class Meter:
    """Losses and speed between two events."""

    def __init__(self, timers: Timers) -> None:
        """timers: of the training's parts, which nobody else reads."""
        self._timers = timers
        self._steps = self._timed = 0
        self._each: list[dict[str, torch.Tensor]] = []
        """This rank's shares of the steps since the last reading."""
        self._reset()

    def _reset(self) -> None:
        self._before, self._each = self._each, []
        self._examples = self._tokens = self._timed = 0
        self._started = time.perf_counter()

    def add(self, losses: dict[str, torch.Tensor], lengths: np.ndarray) -> None:
        """
        losses: this rank's shares of one step.
        lengths: of the global batch's examples.
        """
        self._steps += 1
        self._each.append(losses)
        if self._steps == WARM_UP_STEPS:
            self._timers.read()
            self._started, self._examples, self._tokens = time.perf_counter(), 0, 0
        elif self._steps > WARM_UP_STEPS:
            self._examples += len(lengths)
            self._tokens += int(lengths.sum())
            self._timed += 1

    def read(self, world: World) -> tuple[dict[str, float], dict[str, Any]]:
        """Means since the last reading, each over the steps that gave it; and `timing`, this rank's
        seconds by part, of all these steps together, and their number: nothing where those were the
        first, which are left out. The only place that waits for the device. Every rank must call
        this."""
        shares: dict[str, list[torch.Tensor]] = {}
        for losses in self._each:
            for name, loss in losses.items():
                shares.setdefault(name, []).append(loss)
        means = torch.stack([torch.stack(of_each).mean() for of_each in shares.values()])
        values = dict(zip(shares, world.sum(means).tolist(), strict=True))
        parts = self._timers.read()
        seconds = time.perf_counter() - self._started - sum(parts.get(one, 0.0) for one in BESIDE)
        if self._examples:
            values["examples_per_second"] = round(self._examples / seconds, 1)
            values["tokens_per_second"] = round(self._tokens / seconds, 1)
        rounded = {part: round(each, 6) for part, each in parts.items()}
        timing = {"timing": {"steps": self._timed, "seconds": rounded}} if self._timed else {}
        self._reset()
        return values, timing

    def first_not_finite(self, world: World) -> tuple[int, list[str]]:
        """The first of the steps of the last reading whose loss is not finite, counted from 0, and
        the terms that are not. Every rank must call this."""
        for number, losses in enumerate(self._before):
            names = [name for name in losses if "." not in name]  # others are measures
            finite = torch.isfinite(world.sum(torch.stack([losses[name] for name in names])))
            bad = [
                name
                for name, is_finite in zip(names, finite.tolist(), strict=True)
                if not is_finite
            ]
            if bad:
                return number, [name for name in bad if name != "loss"] or bad
        return len(self._before) - 1, ["their sum"]


def progress_note(values: dict[str, float], learning_rate: float, world: World) -> str:
    """What stands beside a training's progress.

    values: as `Meter.read` gives them.
    """
    note = f"loss {values['loss']:.4f}, lr {learning_rate:.2g}"
    if speed := values.get("tokens_per_second"):
        note += f", {speed:,.0f} tokens/s"
    if world.device.type == "cuda":
        note += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return note
