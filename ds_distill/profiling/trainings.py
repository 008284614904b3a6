"""Some steps of each training of a recipe, measured: time by part, memory, operations."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from ds_distill.engine.engine import model_dtype
from ds_distill.errors import UserError
from ds_distill.parts.phases import Distil
from ds_distill.parts.phases.base import TrainingPhase
from ds_distill.planning.gpus import GPUS, Device, find_device
from ds_distill.planning.planner import Planner, start_of
from ds_distill.profiling.collectives import timed_collectives
from ds_distill.profiling.flops import ModelFlops
from ds_distill.profiling.profiler import Profiler
from ds_distill.recipe import Recipe
from ds_distill.run.context import Run
from ds_distill.run.execute import execute
from ds_distill.run.meter import WARM_UP_STEPS
from ds_distill.timers import REST

BESIDE = ("report", "validation", "checkpoint")
"""Parts that are not in every step: the time of each is of each time."""


@dataclass(frozen=True)
class Profiled:
    """One model's training on rank 0."""

    phase: str
    model: str
    steps: int
    """How many were measured, after those that warm up."""
    seconds: dict[str, float]
    """Of a step, by part: means."""
    quartiles: tuple[float, float]
    """Seconds of a step: first and third quartile over samples of five."""
    beside: dict[str, float]
    """Seconds of what is not in every step, all together."""
    tokens: dict[str, float]
    """Real ones in a step of this rank, by model."""
    flops: dict[str, float]
    """Of a step of this rank, by model: those of real tokens and of the head's rows."""
    peaks: dict[str, int]
    """Most bytes that torch had allocated on the GPU, by part; none on a CPU."""
    resident: int | None
    """Most bytes of the process on a CPU, where the system tells."""
    device_flops: float | None
    """Operations a second that this rank could do: a data sheet's, or measured on a CPU. None for
    a GPU that is not known."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def utilisation(self) -> float | None:
        """Share of the operations a second that the device could do (model FLOPs utilisation)."""
        if self.device_flops is None:
            return None
        return sum(self.flops.values()) / self.step / self.device_flops

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step": self.step, "utilisation": self.utilisation}


def profile_trainings(
    short: Recipe, work: Path, trace: Path | None = None
) -> tuple[list[Profiled], Device | None]:
    """Run a recipe that was shortened, up to its last training, in a folder that is removed
    afterwards. Every rank must call this; all but rank 0 return an empty list.

    Returns the trainings, and the device if its speed is known.

    Raises UserError for a recipe without training, and where `execute` does.
    """
    training = [n for n, phase in enumerate(short.phases) if isinstance(phase, TrainingPhase)]
    if not training:
        raise UserError(f"{short.name}: no phase trains, so there is nothing to profile.")
    profiler = Profiler(trace if os.environ.get("RANK", "0") == "0" else None)
    main = False
    try:
        with timed_collectives():
            runs = execute(short, work, first=training[-1] + 1, profiler=profiler)
        run = next(iter(runs.values()))
        main = run.world.is_main
        if not main:
            return [], None
        device = _device(run)
        return list(_trainings(run, profiler, device)), device
    finally:
        if main:
            shutil.rmtree(work, ignore_errors=True)


def _device(run: Run) -> Device | None:
    """This machine's: a GPU that is not known has no speed."""
    if run.world.device.type != "cuda":
        return find_device("cpu", run.world.size)
    found = torch.cuda.get_device_name().lower().replace(" ", "")
    return next((GPUS[n] for n in sorted(GPUS, key=len, reverse=True) if n in found), None)


def _trainings(run: Run, profiler: Profiler, device: Device | None) -> Iterator[Profiled]:
    short = run.recipe
    planner = Planner(short, device or GPUS["h100"], run.world.size)  # for its models alone
    lines = (run.folder.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "train"]
    names = short.phase_names()
    for number, phase in enumerate(short.phases):
        if not isinstance(phase, TrainingPhase):
            continue
        for output in phase.outputs:
            own = [e for e in events if (e["number"], e["phase"]) == (number, output)]
            timings = [event["timing"] for event in own if "timing" in event]
            observed = profiler.trainings[number, output]
            steps = [n for n in observed.amounts if n >= WARM_UP_STEPS]
            seconds, beside = _means(timings)
            for part in BESIDE:
                if part in observed.last:
                    beside[part] = beside.get(part, 0.0) + observed.last[part]
            models = _model_flops(planner, number, phase, output)
            tokens: dict[str, float] = {}
            flops: dict[str, float] = {}
            for name, count in models.items():
                amounts = [observed.amounts[step][name] for step in steps]
                tokens[name] = sum(amount.tokens for amount in amounts) / len(steps)
                flops[name] = sum(count(amount) for amount in amounts) / len(steps)
            yield Profiled(
                names[number],
                output,
                sum(timing["steps"] for timing in timings),
                seconds,
                _quartiles(timings),
                beside,
                tokens,
                flops,
                observed.peaks,
                observed.resident,
                None if device is None else device.flops(model_dtype(run.deepspeed(phase))),
            )


def _means(timings: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds of a step by part, of what is beside steps)."""
    steps = sum(timing["steps"] for timing in timings)
    total: dict[str, float] = {}
    for timing in timings:
        for part, seconds in timing["seconds"].items():
            total[part] = total.get(part, 0.0) + seconds
    beside = {part: total.pop(part) for part in BESIDE if part in total}
    total[REST] = total.pop(REST)
    return {part: seconds / steps for part, seconds in total.items()}, beside


def _quartiles(timings: list[dict[str, Any]]) -> tuple[float, float]:
    each = [_means([timing]) for timing in timings]
    steps = [sum(seconds.values()) for seconds, _ in each]
    if len(steps) < 2:
        return steps[0], steps[0]
    first, _, third = quantiles(steps, n=4, method="inclusive")
    return first, third


def _model_flops(
    planner: Planner, number: int, phase: TrainingPhase, output: str
) -> dict[str, ModelFlops]:
    found = {"student": ModelFlops.of(planner.model(start_of(phase, output), number), trains=True)}
    if isinstance(phase, Distil) and phase.teachers == "live":
        for name in planner.recipe.teachers:
            found[name] = ModelFlops.of(planner.model(name, number), trains=False)
    return found
