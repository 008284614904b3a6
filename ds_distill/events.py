"""What a run says while it works: metrics.jsonl, console, wandb, TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ds_distill.files import write_text
from ds_distill.recipe.schema import Recipe

PLAIN_LINE_SECONDS = 30.0
"""How often progress is printed where there is no terminal to draw a bar on."""


class Bar:
    """Progress of one piece of work."""

    def __init__(self, console: Console, label: str, total: int, progress: Progress | None) -> None:
        self._console, self._label, self._total, self._progress = console, label, total, progress
        self._task = progress.add_task(label, total=total, note="") if progress else None
        self._done = 0
        self._started = self._said = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)
            if note:
                self._progress.update(self._task, note=note)
            return
        now = time.monotonic()
        if now - self._said > PLAIN_LINE_SECONDS and 0 < self._done < self._total:
            self._said = now
            left = (now - self._started) / self._done * (self._total - self._done)
            self._console.print(
                f"  {self._label}: {self._done}/{self._total}, {_clock(left)} left. {note}"
            )


class RunLog:
    """The run's voice. Only the main process has one that speaks."""

    def __init__(self, folder: Path, recipe: Recipe, *, speaks: bool, resumed: bool) -> None:
        self._file = folder / "metrics.jsonl"
        self._speaks = speaks
        self._console = Console(highlight=False, soft_wrap=True, quiet=not speaks)
        self._wandb: Any = None
        self._tensorboard: Any = None
        if not speaks:
            return
        if recipe.logging.wandb:
            import wandb

            self._wandb = wandb.init(
                project=recipe.logging.wandb,
                name=recipe.name,
                dir=str(folder),
                config=recipe.model_dump(mode="json"),
                resume="allow" if resumed else None,
            )
        if recipe.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

    def say(self, text: str) -> None:
        """A line on the console."""
        self._console.print(text, markup=False)

    def event(self, event: str, *, phase: str, step: int | None = None, **values: Any) -> None:
        """One line of metrics.jsonl; numbers also go to wandb and TensorBoard."""
        if not self._speaks:
            return
        line = {"time": round(time.time(), 3), "event": event, "phase": phase}
        if step is not None:
            line["step"] = step
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **values}, ensure_ascii=False) + "\n")
        numbers = {
            f"{phase}/{event}/{key}": value
            for key, value in values.items()
            if isinstance(value, int | float)
        }
        if self._wandb is not None and numbers:
            # Phases count their own steps; wandb has one axis, so each phase gets its own.
            self._wandb.log({**numbers, f"{phase}/step": step or 0})
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, step or 0)

    def forget_after(self, phase: str, step: int) -> None:
        """Drop a phase's events after `step`: they will be made again from its checkpoint."""
        if not self._speaks or not self._file.exists():
            return
        kept = []
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by the kill
            if event["phase"] != phase or event.get("step", 0) <= step:
                kept.append(line)
        write_text(self._file, "".join(line + "\n" for line in kept))

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Bar]:
        """A progress bar with the time left; on a pipe or in a log file, a line now and then."""
        if not (self._speaks and sys.stdout.isatty()):
            yield Bar(self._console, label, total, None)
            return
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield Bar(self._console, label, total, progress)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
