"""A plan's curves over the number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_distill.errors import UserError
from ds_distill.planning.gpus import GIB
from ds_distill.planning.plan import Choice
from ds_distill.planning.planner import Planner
from ds_distill.reporting.figure_files import new_figure

MOST = 1024


@dataclass(frozen=True)
class Point:
    """A way of running a phase on so many GPUs."""

    gpus: int
    gib: float
    """Memory per GPU."""
    examples_per_second: float
    """Of all GPUs together."""


def curves(planner: Planner) -> dict[str, list[Point]]:
    """Of the recipe's last training phase, by way of running it; each GPU has the micro-batch that
    one has. Raises UserError for a recipe without training."""
    found: dict[str, list[Point]] = {}
    for power in range(MOST.bit_length()):
        gpus = 2**power
        job = planner.on(gpus).last_job()
        if job is None:
            raise UserError(f"{planner.recipe.name}: no phase trains, so there is no figure.")
        for placement in job.others:
            choice = placement.choice
            if choice.checkpointing == job.chosen.choice.checkpointing and choice.stage in (1, 3):
                rate = job.micro_batch * job.micro_steps * gpus / placement.step.total
                point = Point(gpus, placement.total / GIB, rate)
                found.setdefault(_label(choice), []).append(point)
    return found


def _label(choice: Choice) -> str:
    teachers = f"{choice.teachers} teachers, " if choice.teachers else ""
    return f"{teachers}stage {choice.stage}"


def plot_curves(planner: Planner, path: Path) -> None:
    """Memory and speed of `curves`. The suffix of `path` is the format: svg, png or pdf."""
    with new_figure(path, (10, 4.5), panels=2) as [memory, speed]:
        for label, points in curves(planner).items():
            gpus = [point.gpus for point in points]
            memory.plot(gpus, [point.gib for point in points], marker=".", label=label)
            speed.plot(
                gpus, [point.examples_per_second for point in points], marker=".", label=label
            )
        device = planner.device
        usable = device.usable / GIB
        memory.axhline(usable, color="grey", linestyle="--", linewidth=1)
        memory.annotate(f"{device.name}: {usable:.0f} GiB", (1, usable), fontsize=8, va="bottom")
        memory.set(xscale="log", xlabel="GPUs", ylabel="GiB per GPU", ylim=(0, None))
        speed.set(
            xscale="log", yscale="log", xlabel="GPUs", ylabel="examples per second (estimate)"
        )
        shown = [4**power for power in range(6)]
        for axis in (memory, speed):
            axis.set_xticks(shown, labels=[f"{gpus:,}" for gpus in shown], minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        memory.figure.suptitle(
            f"{planner.recipe.name}, {device.name}, the same micro-batch on each GPU"
        )
