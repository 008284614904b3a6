"""Some steps of each training of a recipe, measured: time by part, memory, operations."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ds_distill.engine.config import STEPS_AHEAD
from ds_distill.engine.precision import model_dtype
from ds_distill.errors import UserError
from ds_distill.files import write_text
from ds_distill.planning.gpus import GPUS, own_gpu
from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.planning.planner import Planner
from ds_distill.planning.units import duration, gib, milliseconds
from ds_distill.process.identity import get_rank
from ds_distill.process.lease import Locked, check_free
from ds_distill.process.timers import REST
from ds_distill.profiling.collectives import timed_collectives
from ds_distill.recipe import LONE_TASK, Recipe
from ds_distill.recipe.phases import Distil, TrainingPhase, training_name
from ds_distill.run.execute import execute
from ds_distill.run.folder import PROFILE, RunFolder
from ds_distill.run.observer import BESIDE, Amount, Observer, read_timings
from ds_distill.run.run import Run
from ds_distill.tables import Table
from ds_distill.training.meter import WARM_UP_STEPS

SAMPLE = STEPS_AHEAD
"""Steps that are timed together: reading the clock after each would keep a GPU from running
ahead, and the first of a window has its teachers' pass."""

_OTHER_EXAMPLES = 128
"""Of splits that no training reads."""


def total_steps(measured: int) -> int:
    """Optimizer steps of each training of which so many are to be measured."""
    return WARM_UP_STEPS + measured


def shortening(recipe: Recipe, measured: int, splits: Mapping[str, Collection[str]]) -> list[str]:
    """Overrides that make a recipe short: `measured` steps of each training beside warm-up, one
    epoch of examples for them, and few for all else.

    splits: those that the data have, by task.
    """
    return list(_overrides(recipe, total_steps(measured), splits))


def _once(steps: int) -> int:
    """A `save_every` that makes one checkpoint before the end, between two samples if it can."""
    last = SAMPLE * ((steps - 1) // SAMPLE)
    return last if 2 * last > steps else steps - 1


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
            yield f"phases.{name}.save_every={_once(steps)}"
    for name, task in recipe.tasks_by_name.items():
        section = "task" if name == LONE_TASK and recipe.task is not None else f"tasks.{name}"
        for split, most in wanted[name].items():
            least = min(most, task.data.limit.get(split, most))
            yield f"{section}.data.limit.{split}={least}"


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
    """Seconds of a step: first and third quartile over samples of SAMPLE."""
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
    def name(self) -> str:
        return f"{self.phase}: {self.model}"

    @property
    def step_flops(self) -> float:
        return sum(self.flops.values())

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def trained_tokens(self) -> float:
        """Real tokens in a step of the models that train: of one, or of those with a shared head,
        which have no teachers."""
        return self.tokens.get("student") or sum(self.tokens.values())

    @property
    def utilisation(self) -> float | None:
        """Share of the operations a second that the device could do (model FLOPs utilisation)."""
        if self.device_flops is None:
            return None
        return self.step_flops / self.step / self.device_flops

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step": self.step, "utilisation": self.utilisation}


def profile_trainings(
    short: Recipe,
    work: Path,
    trace: Path | None = None,
    begins: Callable[[], None] = lambda: None,
) -> list[Profiled]:
    """Run a recipe that was shortened, up to its last training, in a folder that is removed
    afterwards. Every rank must call this; all but rank 0 return an empty list.

    begins: called on rank 0 before the first training, when nothing was refused.

    Raises UserError for a recipe without training, and where `execute` does.
    """
    training = [n for n, phase in enumerate(short.phases) if isinstance(phase, TrainingPhase)]
    if not training:
        raise UserError(f"{short.name}: no phase trains, so there is nothing to profile.")
    is_main = get_rank() == 0
    observer = Observer(trace, begins) if is_main else Observer()
    with _folder_of_main(short, work) if is_main else nullcontext():
        with timed_collectives():
            runs = execute(short, work, first=training[-1] + 1, observer=observer)
        if not is_main:
            return []
        return list(_profiled(next(iter(runs.values())), observer))


@contextmanager
def _folder_of_main(recipe: Recipe, work: Path) -> Iterator[None]:
    """The folder of a profile, which is removed afterwards, whatever happens; what a killed one has
    left is removed before. Raises UserError for any other folder that is there."""
    if (work / PROFILE).is_file():
        check_free(work)
        shutil.rmtree(work)
    elif work.is_dir() and any(work.iterdir()):
        raise UserError(
            f"--folder {work}: exists, and is not of a profile, whose folder goes when it "
            "has ended. Name a new one."
        )
    RunFolder(work).check_new_or_same(recipe, resume=False)
    write_text(work / PROFILE, "")
    ours = True
    try:
        yield
    except Locked:  # by another profile, which began at the same moment
        ours = False
        raise
    finally:
        if ours:
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
    planner = Planner(run.recipe, GPUS["h100"], run.world.size)  # for its models alone
    timings = read_timings(run.folder.path / "metrics.jsonl")
    for number, phase in enumerate(run.recipe.phases):
        if not isinstance(phase, TrainingPhase):
            continue
        for outputs in phase.trainings:
            key = number, training_name(outputs)
            timing, observed = timings[key], observer.trainings[key]
            beside = timing.beside
            for part in (part for part in BESIDE if part in observed.last):
                beside[part] = beside.get(part, 0.0) + observed.last[part]
            steps = [one for step, one in observed.amounts.items() if step >= WARM_UP_STEPS]
            counts = _model_flops(planner, number, phase, outputs)
            yield Profiled(
                run.recipe.phase_names()[number],
                key[1],
                timing.steps,
                timing.seconds,
                timing.quartiles,
                beside,
                {name: fmean(one[name].tokens for one in steps) for name in counts},
                {name: fmean(of(one[name]) for one in steps) for name, of in counts.items()},
                observed.peaks,
                observed.resident,
                _device_flops(run.world.device, model_dtype(run.deepspeed(phase))),
            )


def _model_flops(
    planner: Planner, number: int, phase: TrainingPhase, outputs: list[str]
) -> dict[str, Callable[[Amount], float]]:
    names = outputs if len(outputs) > 1 else ["student"]
    found = {
        name: flops_of(planner.model(phase.start_of(output), number), trains=True)
        for name, output in zip(names, outputs, strict=True)
    }
    if isinstance(phase, Distil) and phase.teachers == "live":
        for name in planner.teachers(number, phase):
            found[name] = flops_of(planner.model(name, number), trains=False)
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

    def flops(length: int, rows: int = _EXAMPLES) -> float:
        own = rows if masked else None
        one = Pass(_EXAMPLES, length, own, torch.float32, trains, fused=False, mask_bytes=None)
        return cost(model, one).flops / _EXAMPLES

    lengths = (16, 32, 48)
    at = np.array([[1, length, length**2] for length in lengths])
    example, token, square = np.linalg.solve(at, [flops(length) for length in lengths])
    row = flops(lengths[0], 2 * _EXAMPLES) - flops(lengths[0]) if masked else 0.0
    terms = np.array([example - row, token, square, row])
    return lambda amount: float(terms @ astuple(amount))


# ------------------------------------------------------------------------------------- as tables


def trainings_text(trainings: Sequence[Profiled], ranks: int) -> str:
    """Time, speed and memory of a step of each training, of rank 0."""
    return "\n\n".join(table.text() for table in _tables(trainings, ranks)) + "\n"


_BESIDE = ("validation", "checkpoint")


def _tables(trainings: Sequence[Profiled], ranks: int) -> Iterator[Table]:
    of = f"of rank 0 of {ranks}, " if ranks > 1 else ""
    parts = _parts(one.seconds for one in trainings)
    yield Table(
        f"Milliseconds of a step, {of}means of {trainings[0].steps} steps",
        ["phase: model", *parts, "step", "quartiles"],
        [
            [
                one.name,
                *(milliseconds(one.seconds.get(part)) for part in parts),
                milliseconds(one.step),
                "-".join(map(milliseconds, one.quartiles)),
            ]
            for one in trainings
        ],
    )
    peaks = sorted({one.device_flops for one in trainings if one.device_flops is not None})
    of_device = " or ".join(f"{flops / 1e12:.3g} TFLOP/s" for flops in peaks)
    on_gpu = [one for one in trainings if one.peaks]
    whose = "NVIDIA's data sheet" if on_gpu else "measured here"
    yield Table(
        "Speed, and operations of real tokens and of the head's rows",
        ["phase: model", "tokens/s", "GFLOP a step", "TFLOP/s", "utilisation", *_BESIDE, "GiB"],
        [
            [
                one.name,
                f"{one.trained_tokens / one.step:,.0f}",
                f"{one.step_flops / 1e9:,.1f}",
                f"{one.step_flops / one.step / 1e12:,.3g}",
                "" if one.utilisation is None else f"{one.utilisation:.0%}",
                *(duration(one.beside[part]) if part in one.beside else "" for part in _BESIDE),
                gib(max(one.peaks.values(), default=one.resident)),
            ]
            for one in trainings
        ],
        [f"Utilisation: of {of_device}, {whose}."] if peaks else [],
    )
    if on_gpu:
        parts = _parts(one.peaks for one in trainings)
        rows = [[one.name, *(gib(one.peaks.get(part)) for part in parts)] for one in trainings]
        yield Table("GiB allocated at most, by part", ["phase: model", *parts], rows)


def _parts(of_each: Iterable[Iterable[str]]) -> list[str]:
    """All parts of some trainings: as in the training that has most, what else there is behind,
    REST last."""
    longest_first = sorted(map(list, of_each), key=len, reverse=True)
    parts = dict.fromkeys(part for parts in longest_first for part in parts)
    return sorted(parts, key=lambda part: part == REST)
