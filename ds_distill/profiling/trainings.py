"""Some steps of each training of a recipe, measured: time by part, memory, operations."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ds_distill.engine.config import STEPS_AHEAD
from ds_distill.engine.precision import model_dtype
from ds_distill.errors import UserError
from ds_distill.planning.facts import Facts
from ds_distill.planning.gpus import GPUS, own_gpu
from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.planning.units import duration, gib, milliseconds
from ds_distill.process.identity import get_rank
from ds_distill.process.timers import REST
from ds_distill.profiling.collectives import timed_collectives
from ds_distill.recipe import LONE_TASK, Recipe
from ds_distill.recipe.phases import Distil, TrainingPhase, training_name
from ds_distill.run.execute import execute
from ds_distill.run.observer import BESIDE, Amount, Observer, read_timings
from ds_distill.run.run import Run
from ds_distill.tables import Table
from ds_distill.training.meter import WARM_UP_STEPS

SAMPLE = STEPS_AHEAD
"""Steps that are timed together: reading the clock after each would keep a GPU from running
ahead, and the first of a window has its teachers' pass."""

_OTHER_EXAMPLES = 128
"""Of splits that no training reads."""


Profiled = dict[str, Any]
"""Of one model's training on rank 0: `steps`, how many were measured; `seconds` of one by part, and
`quartiles` of them over samples; `beside`, seconds of what is not in every step, all together; of a
step of this rank, by model, real `tokens` and the `flops` of these and of the head's rows; `peaks`,
most bytes that torch had allocated on the GPU, by part, and on a CPU `resident`, those of the
process; `device_flops` a second that this rank could do, by a data sheet, or measured on a CPU;
`utilisation`, the share of them that it did. None for what is not known."""


def shortening(recipe: Recipe, measured: int, splits: Mapping[str, Collection[str]]) -> list[str]:
    """Overrides that make a recipe short: `measured` steps of each training beside warm-up, one
    epoch of examples for them, and few for all else.

    splits: those that the data have, by task.
    """
    return list(_overrides(recipe, WARM_UP_STEPS + measured, splits))


def _overrides(recipe: Recipe, steps: int, splits: Mapping[str, Collection[str]]) -> Iterator[str]:
    yield f"logging={{every: {SAMPLE}}}"
    yield "training.patience=null"
    wanted = {task: dict.fromkeys(names, _OTHER_EXAMPLES) for task, names in splits.items()}
    for name, phase in recipe.named_phases():
        if isinstance(phase, TrainingPhase):
            of_task = wanted[recipe.task_name(phase)]
            of_task[phase.split] = max(of_task.get(phase.split, 0), steps * phase.batch_size)
            yield f"phases.{name}.steps={steps}"
            yield f"phases.{name}.patience=null"
            yield f"phases.{name}.save_every={steps - 1}"
    for name, task in recipe.tasks_by_name.items():
        section = "task" if name == LONE_TASK and recipe.task is not None else f"tasks.{name}"
        for split, most in wanted[name].items():
            least = min(most, task.data.limit.get(split, most))
            yield f"{section}.data.limit.{split}={least}"


def profile_trainings(
    short: Recipe, work: Path, begins: Callable[[], None] = lambda: None
) -> list[Profiled]:
    """Run a recipe that was shortened, up to its last training, in a new folder that is removed
    afterwards. Every rank must call this; all but rank 0 return an empty list.

    begins: called on rank 0 before the first training, when nothing was refused.

    Raises UserError for a recipe without training, for a folder that is there, and where `execute`
    does.
    """
    training = [n for n, phase in enumerate(short.phases) if isinstance(phase, TrainingPhase)]
    if not training:
        raise UserError(f"{short.name}: no phase trains, so there is nothing to profile.")
    is_main = get_rank() == 0
    observer = Observer(begins) if is_main else Observer()
    if is_main and work.is_dir() and any(work.iterdir()):
        raise UserError(
            f"--folder {work}: exists, and a profile's folder goes when it has ended. Remove it, "
            "or name a new one."
        )
    try:
        with timed_collectives():
            runs = execute(short, work, first=training[-1] + 1, observer=observer)
        return list(_profiled(next(iter(runs.values())), observer)) if is_main else []
    finally:
        if is_main:
            shutil.rmtree(work, ignore_errors=True)


def _device_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second: of a CPU those of this rank's threads, measured in a moment."""
    if device.type == "cuda":
        known = own_gpu(device)
        return None if known is None else known.flops(dtype)
    factor, seconds = torch.ones(1024, 1024, dtype=dtype), []
    for _ in range(5):
        started = time.perf_counter()
        factor @ factor
        seconds.append(time.perf_counter() - started)
    return 2 * 1024**3 / min(seconds)


def _profiled(run: Run, observer: Observer) -> Iterator[Profiled]:
    facts = Facts(run.recipe, GPUS["h100"], run.world.size)  # for its models alone
    timings = read_timings(run.folder.path / "metrics.jsonl")
    for number, phase in enumerate(run.recipe.phases):
        if not isinstance(phase, TrainingPhase):
            continue
        for outputs in phase.trainings:
            key = number, training_name(outputs)
            timing, observed = timings[key], observer.trainings[key]
            beside = Counter(timing.beside)
            beside.update({part: observed.last[part] for part in BESIDE if part in observed.last})
            steps = [one for step, one in observed.amounts.items() if step >= WARM_UP_STEPS]
            counts = _model_flops(facts, number, phase, outputs)
            flops = {name: fmean(of(one[name]) for one in steps) for name, of in counts.items()}
            device = _device_flops(run.world.device, model_dtype(run.deepspeed(phase)))
            step = sum(timing.seconds.values())
            yield {
                "phase": run.recipe.phase_names()[number],
                "model": key[1],
                "steps": timing.steps,
                "seconds": timing.seconds,
                "step": step,
                "quartiles": timing.quartiles,
                "beside": dict(beside),
                "tokens": {name: fmean(one[name].tokens for one in steps) for name in counts},
                "flops": flops,
                "peaks": observed.peaks,
                "resident": observed.resident,
                "device_flops": device,
                "utilisation": device and sum(flops.values()) / step / device,
            }


def _model_flops(
    facts: Facts, number: int, phase: TrainingPhase, outputs: list[str]
) -> dict[str, Callable[[Amount], float]]:
    names = outputs if len(outputs) > 1 else ["student"]
    found = {
        name: flops_of(facts.model(phase.start_of(output), number), trains=True)
        for name, output in zip(names, outputs, strict=True)
    }
    if isinstance(phase, Distil) and phase.teachers == "live":
        for name in facts.teachers(number, phase):
            found[name] = flops_of(facts.model(name, number), trains=False)
    return found


_EXAMPLES = 100
"""Of the passes that are counted: what a pass needs but once, such as DeBERTa's relative
positions, becomes small beside them."""


@lru_cache
def flops_of(model: PlannedModel, trains: bool) -> Callable[[Amount], float]:
    """Of a model's passes over real tokens and rows of the head, as torch's FlopCounterMode counts:
    two for each multiplication of matrix products. They are a sum of four terms, because every
    layer is the same: examples, tokens, tokens squared (attention) and the rows of a masked-LM's
    head.

    trains: forward and backward, gradients of all weights; else forward alone.
    """
    masked = model.classes is None

    def flops(length: int, rows: int = 1) -> float:
        """Of one example with so many rows."""
        share = rows / length if masked else None
        one = Pass(_EXAMPLES, length, share, torch.float32, False, fused=False, trains=trains)
        return cost(model, one).flops / _EXAMPLES

    lengths = (16, 32, 48)
    at = np.array([[1, length, length**2] for length in lengths])
    example, token, square = np.linalg.solve(at, [flops(length) for length in lengths])
    row = flops(lengths[0], 2) - flops(lengths[0]) if masked else 0.0
    terms = np.array([example - row, token, square, row])
    return lambda amount: float(terms @ astuple(amount))


# ------------------------------------------------------------------------------------- as tables


_BESIDE = ("validation", "checkpoint")


def trainings_tables(trainings: Sequence[Profiled], ranks: int) -> Iterator[Table]:
    """Time, speed and memory of a step of each training, of rank 0."""
    of = f"of rank 0 of {ranks}, " if ranks > 1 else ""
    names = [f"{one['phase']}: {one['model']}" for one in trainings]
    each = [*zip(names, trainings, strict=True)]
    parts = _parts(one["seconds"] for one in trainings)
    yield Table(
        f"Milliseconds of a step, {of}means of {trainings[0]['steps']} steps",
        ["phase: model", *parts, "step", "quartiles"],
        [
            [
                name,
                *(milliseconds(one["seconds"].get(part)) for part in parts),
                milliseconds(one["step"]),
                "-".join(map(milliseconds, one["quartiles"])),
            ]
            for name, one in each
        ],
    )
    peaks = sorted({one["device_flops"] for one in trainings if one["device_flops"] is not None})
    of_device = " or ".join(f"{flops / 1e12:.3g} TFLOP/s" for flops in peaks)
    on_gpu = any(one["peaks"] for one in trainings)
    whose = "NVIDIA's data sheet" if on_gpu else "measured here"
    yield Table(
        "Speed, and operations of real tokens and of the head's rows",
        ["phase: model", "tokens/s", "GFLOP a step", "TFLOP/s", "utilisation", *_BESIDE, "GiB"],
        [[name, *_speed(one)] for name, one in each],
        [f"Utilisation: of {of_device}, {whose}."] if peaks else [],
    )
    if on_gpu:
        parts = _parts(one["peaks"] for one in trainings)
        rows = [[name, *(gib(one["peaks"].get(part)) for part in parts)] for name, one in each]
        yield Table("GiB allocated at most, by part", ["phase: model", *parts], rows)


def _speed(one: Profiled) -> list[str]:
    # Of the models that train: of one, or of those with a shared head, which have no teachers.
    tokens, flops = one["tokens"], sum(one["flops"].values())
    return [
        f"{(tokens.get('student') or sum(tokens.values())) / one['step']:,.0f}",
        f"{flops / 1e9:,.1f}",
        f"{flops / one['step'] / 1e12:,.3g}",
        "" if one["utilisation"] is None else f"{one['utilisation']:.0%}",
        *(duration(one["beside"][part]) if part in one["beside"] else "" for part in _BESIDE),
        gib(max(one["peaks"].values(), default=one["resident"])),
    ]


def _parts(of_each: Iterable[Iterable[str]]) -> list[str]:
    """All parts of some trainings: as in the training that has most, what else there is behind,
    REST last."""
    longest_first = sorted(map(list, of_each), key=len, reverse=True)
    parts = dict.fromkeys(part for parts in longest_first for part in parts)
    return sorted(parts, key=lambda part: part == REST)
