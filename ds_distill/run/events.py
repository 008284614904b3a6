"""The log of a run: console, progress bars, metrics.jsonl, wandb, TensorBoard."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

from ds_distill.files import check_guards, read_text, write_text
from ds_distill.process.terminal import escaped
from ds_distill.recipe.schema import Recipe

PLAIN_LINE_SECONDS = 30.0
"""Interval of progress lines where the output is no terminal."""

LOG_FILE_WIDTH = 140
"""Characters."""


class Bar:
    """Progress of one piece of work."""

    def __init__(
        self, console: Console, label: str, total: int, progress: Progress | None, done: int = 0
    ) -> None:
        self._console, self._label, self._total, self._progress = console, label, total, progress
        self._task = None
        if progress is not None:
            self._task = progress.add_task(label, total=total, completed=done, note="")
        self._first = self._done = done
        self._note = ""
        self._started = self._printed = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        """note: what stands beside it from now on, unless it is empty."""
        self._done += amount
        self._note = note or self._note
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done, note=self._note)
            return
        now = time.monotonic()
        if now - self._printed > PLAIN_LINE_SECONDS and self._first < self._done < self._total:
            self._printed = now
            each = (now - self._started) / (self._done - self._first)
            left = _clock(each * (self._total - self._done))
            parts = [f"{self._done}/{self._total}", *filter(None, [self._note]), f"{left} left"]
            self._console.print(f"  {self._label}: {', '.join(parts)}", markup=False)


class RunLog:
    """Writes a run's log. Enabled on the main process only; elsewhere calls do nothing."""

    def __init__(self, folder: Path, recipe: Recipe, *, enabled: bool, resumed: bool) -> None:
        self._file = folder / "metrics.jsonl"
        self._enabled, self._resumed = enabled, resumed
        self._number = 0
        self._console = Console(highlight=False, soft_wrap=True, quiet=not enabled)
        if not self._console.is_terminal:
            self._console.width = LOG_FILE_WIDTH
        self._wandb: Any = None
        self._tensorboard: Any = None
        if not enabled:
            return
        if recipe.logging.wandb:
            self._wandb = _start_wandb(folder, recipe)
        if recipe.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

    def info(self, text: str) -> None:
        """Print a line on the console."""
        self._console.print(escaped(text), markup=False)

    def start_phase(self, number: int, name: str) -> float:
        """Events that follow belong to phase `number`. Its events from before a resume are dropped,
        except those of trainings, which continue (see `forget_after`). Returns the seconds that
        earlier starts have worked on it, each until its last event."""
        self._number, before = number, 0.0
        if self._resumed and self._enabled and self._file.exists():
            of_phase = [event for _, event in read_events(self._file) if event["number"] == number]
            before = _worked(of_phase)
            self._rewrite(lambda event: event["number"] != number or "step" in event)
        self.event("start", phase=name, before=round(before, 2))
        return before

    def event(self, event: str, *, phase: str, step: int | None = None, **values: Any) -> None:
        """Add a line to metrics.jsonl; numbers also go to wandb and TensorBoard.

        phase: the phase's name, or the name of the model that it trains or runs.
        """
        if not self._enabled:
            return
        line = {
            "time": round(time.time(), 3),
            "event": event,
            "number": self._number,
            "phase": phase,
        }
        if step is not None:
            line["step"] = step
        check_guards()
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **values}, ensure_ascii=False) + "\n")
        group = f"{self._number:02d}-{phase}"  # two phases may train models of the same name
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

    def forget_after(self, phase: str, step: int) -> list[int]:
        """Drop a training's events after `step`: it repeats these steps from its checkpoint.
        Returns the steps of what was dropped."""
        dropped = []

        def keep(event: dict[str, Any]) -> bool:
            if (event["number"], event["phase"]) != (self._number, phase):
                return True
            at = event.get("step", 0)
            # The event `epoch` belongs to the steps that follow it.
            if at < step or (at == step and event["event"] != "epoch"):
                return True
            dropped.append(at)
            return False

        if self._resumed:
            self._rewrite(keep)
        return dropped

    def _rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite metrics.jsonl with some of its events; drops a line that a kill cut off."""
        if not self._enabled or not self._file.exists():
            return
        lines = [line for line, event in read_events(self._file) if keep(event)]
        write_text(self._file, "".join(line + "\n" for line in lines))

    @contextmanager
    def bar(self, label: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A progress bar with the time left; on a pipe or in a log file, a line at intervals.

        done: of the total, before this start.
        """
        label = escaped(label)
        if not (self._enabled and sys.stdout.isatty()):
            yield Bar(self._console, label, total, None, done)
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
            yield Bar(self._console, label, total, progress, done)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_events(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a metrics.jsonl, each with its event, without those that are none: a kill cuts
    one off."""
    # Not `splitlines`: JSON leaves Unicode's line separators in a text as they are.
    for line in read_text(file, "replace").split("\n"):
        with suppress(ValueError):
            event = json.loads(line)
            yield line, event


def _worked(events: list[dict[str, Any]]) -> float:
    """The seconds of a phase up to the last of its events, in their order."""
    if not events:
        return 0.0
    last_start = next((e for e in reversed(events) if e["event"] == "start"), events[0])
    return max(last_start.get("before", 0.0) + events[-1]["time"] - last_start["time"], 0.0)


def _start_wandb(folder: Path, recipe: Recipe) -> Any:
    """A wandb run in the run's folder; a resumed run continues the same one."""
    import wandb

    identity = folder / "wandb" / "id.txt"
    run_id = identity.read_text(encoding="utf-8") if identity.is_file() else uuid.uuid4().hex
    write_text(identity, run_id)
    return wandb.init(
        project=recipe.logging.wandb,
        name=recipe.name,
        id=run_id,
        resume="allow",
        dir=str(folder),
        config=recipe.model_dump(mode="json"),
        # wandb's copy of the console would contain every frame of the progress bar.
        settings=wandb.Settings(console="off"),
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
