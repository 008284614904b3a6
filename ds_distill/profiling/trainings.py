"""Some steps of each training of a recipe, measured: time by part, memory, operations."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ds_distill.engine.precision import model_dtype
from ds_distill.errors import UserError
from ds_distill.files import write_text
from ds_distill.planning.gpus import GPUS, own_gpu
from ds_distill.planning.planner import Planner
from ds_distill.process.identity import get_rank
from ds_distill.process.lease import Locked, check_free
from ds_distill.process.timers import REST
from ds_distill.profiling.collectives import timed_collectives
from ds_distill.profiling.flops import flops_of
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Distil, TrainingPhase, training_name
from ds_distill.run.execute import execute
from ds_distill.run.folder import PROFILE, RunFolder
from ds_distill.run.observer import BESIDE, Amount, Observer, read_timings
from ds_distill.run.run import Run
from ds_distill.training.meter import WARM_UP_STEPS


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
        return sum(self.flops.values()) / self.step / self.device_flops

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step": self.step, "utilisation": self.utilisation}


def parts_in_order(of_each: Iterable[Iterable[str]]) -> list[str]:
    """All parts of some trainings: as in the training that has most, what else there is behind,
    REST last."""
    longest_first = sorted(map(list, of_each), key=len, reverse=True)
    parts = dict.fromkeys(part for parts in longest_first for part in parts)
    return [*(part for part in parts if part != REST), *(part for part in parts if part == REST)]


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
        return list(_trainings(next(iter(runs.values())), observer))


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


def _trainings(run: Run, observer: Observer) -> Iterator[Profiled]:
    short = run.recipe
    planner = Planner(short, GPUS["h100"], run.world.size)  # for its models alone
    timings = read_timings(run.folder.path / "metrics.jsonl")
    names = short.phase_names()
    for number, phase in enumerate(short.phases):
        if not isinstance(phase, TrainingPhase):
            continue
        for outputs in phase.trainings:
            training = training_name(outputs)
            timing = timings[number, training]
            observed = observer.trainings[number, training]
            steps = [n for n in observed.amounts if n >= WARM_UP_STEPS]
            beside = timing.beside
            for part in BESIDE:
                if part in observed.last:
                    beside[part] = beside.get(part, 0.0) + observed.last[part]
            models = _model_flops(planner, number, phase, outputs)
            tokens: dict[str, float] = {}
            flops: dict[str, float] = {}
            for name, count in models.items():
                amounts = [observed.amounts[step][name] for step in steps]
                tokens[name] = sum(amount.tokens for amount in amounts) / len(steps)
                flops[name] = sum(count(amount) for amount in amounts) / len(steps)
            yield Profiled(
                names[number],
                training,
                timing.steps,
                timing.seconds,
                timing.quartiles,
                beside,
                tokens,
                flops,
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
        recipe = planner.recipe
        for name in (n for n in recipe.teachers_of(phase) if n not in recipe.from_files):
            found[name] = flops_of(planner.model(name, number), trains=False)
    return found
