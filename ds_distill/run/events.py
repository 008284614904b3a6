"""What a run says while it works: metrics.jsonl, console, wandb, TensorBoard."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
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


LOG_FILE_WIDTH = 140
"""Characters."""


class Bar:
    """Progress of one piece of work."""

    def __init__(self, console: Console, label: str, total: int, progress: Progress | None) -> None:
        self._console, self._label, self._total, self._progress = console, label, total, progress
        self._task = progress.add_task(label, total=total, note="") if progress else None
        self._done = 0
        self._started = self._printed = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)
            if note:
                self._progress.update(self._task, note=note)
            return
        now = time.monotonic()
        if now - self._printed > PLAIN_LINE_SECONDS and 0 < self._done < self._total:
            self._printed = now
            left = (now - self._started) / self._done * (self._total - self._done)
            self._console.print(
                f"  {self._label}: {self._done}/{self._total}, {_clock(left)} left. {note}",
                markup=False,
            )


def open_console(*, quiet: bool = False) -> Console:
    """As wide as the terminal; where there is none, as a log file bears."""
    console = Console(highlight=False, soft_wrap=True, quiet=quiet)
    if not console.is_terminal:
        console.width = LOG_FILE_WIDTH
    return console


class RunLog:
    """The run's voice. Only the main process has one that speaks."""

    def __init__(self, folder: Path, recipe: Recipe, *, speaks: bool, resumed: bool) -> None:
        self._file = folder / "metrics.jsonl"
        self._speaks, self._resumed = speaks, resumed
        self._number = 0
        self._console = open_console(quiet=not speaks)
        self._wandb: Any = None
        self._tensorboard: Any = None
        if not speaks:
            return
        if recipe.logging.wandb:
            self._wandb = _start_wandb(folder, recipe)
        if recipe.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

    def say(self, text: str) -> None:
        """A line on the console."""
        self._console.print(text, markup=False)

    def show(self, table: RenderableType) -> None:
        """A table on the console."""
        self._console.print(table, soft_wrap=False)

    def start_phase(self, number: int) -> None:
        """Events that follow belong to phase `number`. Those that an earlier attempt at it left
        are dropped, except of its trainings, which continue (see `forget_after`)."""
        self._number = number
        if self._resumed:
            self._keep(lambda event: event["number"] != number or "step" in event)

    def event(self, event: str, *, phase: str, step: int | None = None, **values: Any) -> None:
        """One line of metrics.jsonl; numbers also go to wandb and TensorBoard.

        phase: the phase's name, or the name of the model that it trains.
        """
        if not self._speaks:
            return
        line = {
            "time": round(time.time(), 3),
            "event": event,
            "number": self._number,
            "phase": phase,
        }
        if step is not None:
            line["step"] = step
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **values}, ensure_ascii=False) + "\n")
        group = f"{self._number:02d}-{phase}"  # two phases may train a model of one name
        numbers = {
            f"{group}/{event}/{key}": value
            for key, value in values.items()
            if isinstance(value, int | float)
        }
        if self._wandb is not None and numbers:
            # Phases count their own steps; wandb has one axis, so each phase gets its own.
            self._wandb.log({**numbers, f"{group}/step": step or 0})
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, step or 0)

    def forget_after(self, phase: str, step: int) -> None:
        """Drop a training's events after `step`: they will be made again from its checkpoint."""

        def stays(event: dict[str, Any]) -> bool:
            if (event["number"], event["phase"]) != (self._number, phase):
                return True
            at = event.get("step", 0)
            return at < step or (at == step and event["event"] != "epoch")  # opens what follows

        if self._resumed:
            self._keep(stays)

    def _keep(self, stays: Callable[[dict[str, Any]], bool]) -> None:
        """Write metrics.jsonl anew with some of its events, without a line cut off by a kill."""
        if not self._speaks or not self._file.exists():
            return
        kept = []
        for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if stays(event):
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


def _start_wandb(folder: Path, recipe: Recipe) -> Any:
    """A wandb run in the run's folder; a resumed run goes on in the same one."""
    import wandb

    identity = folder / "wandb" / "id.txt"
    known = identity.read_text(encoding="utf-8") if identity.is_file() else uuid.uuid4().hex
    write_text(identity, known)
    return wandb.init(
        project=recipe.logging.wandb,
        name=recipe.name,
        id=known,
        resume="allow",
        dir=str(folder),
        config=recipe.model_dump(mode="json"),
        # Its copy of the console would be full of the progress bar's frames.
        settings=wandb.Settings(console="off"),
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
