"""Checkpoints of a training: written completely or not at all; the newest two stay."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from safetensors import SafetensorError

from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.errors import UserError, first_line
from ds_distill.files import check_guards, publish_folder, read_json, write_json
from ds_distill.process.peak_memory import is_out_of_memory

SAVE_TOTAL_LIMIT = 2
SEEN_WITHIN = 60
"""Seconds in which a network file system shows other hosts what one has written."""
T = TypeVar("T")
clock = time.monotonic


class Checkpoints:
    """Checkpoints `step-N` of one training, on a file system that all ranks see."""

    def __init__(self, folder: Path, world: World, minutes: float = 10.0) -> None:
        """minutes: between one and the next, see `is_due`."""
        self._folder, self._world, self._minutes = folder, world, minutes
        self._last = clock()

    def is_due(self) -> bool:
        """Whether the last one is old. The main process alone says so."""
        return self._world.is_main and clock() - self._last >= 60 * self._minutes

    def save(self, engine: Engine, step: int, progress: dict[str, Any]) -> None:
        """Every rank writes its part to a temporary folder, which is then renamed."""
        final = self._folder / f"step-{step:08d}"
        temporary = self._folder / f".step-{step:08d}.tmp"
        if self._world.is_main:
            check_guards()
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._world.barrier()
        try:
            engine.save(temporary)
            if self._world.is_main:
                files = {
                    str(file.relative_to(temporary)): file.stat().st_size
                    for file in sorted(temporary.rglob("*"))
                    if file.is_file()
                }
                write_json(temporary / "progress.json", {"progress": progress, "files": files})
                publish_folder(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it takes space
            raise
        if self._world.is_main:
            for old in self._complete()[:-SAVE_TOTAL_LIMIT]:
                shutil.rmtree(old, ignore_errors=True)
        self._last = clock()
        self._world.barrier()

    def load(self, engine: Engine, progress: type[T]) -> T | None:
        """Load the newest complete checkpoint, of any number of ranks. Returns its progress, a
        dataclass or dict, or None without one. Every rank must call this.

        Raises UserError where it is damaged, or a rank does not see it.
        """
        if self._world.is_main and self._folder.is_dir():
            for leftover in self._folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        # Of all ranks: another host may still see the files of a minute ago.
        name = self._world.from_main(
            lambda: next((one.name for one in self._complete()[::-1]), None)
        )
        if name is None:
            return None
        newest = self._folder / name
        self._wait_for(newest)
        try:
            engine.load(newest)
            return _progress(newest, progress)
        except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"checkpoint {newest} cannot be read: {first_line(error)}. Remove that folder: the "
                "training then goes on from the checkpoint before it, or begins again."
            ) from error

    def _wait_for(self, checkpoint: Path) -> None:
        """Until this host sees it whole: a network file system shows new files late."""
        for _ in range(round(SEEN_WITHIN * 10)):
            if checkpoint in self._complete():
                return
            time.sleep(0.1)
        raise UserError(
            f"checkpoint {checkpoint}: rank {self._world.rank} on {socket.gethostname()} does not "
            "see all of it, and rank 0 does. Resume when its file system shows it, or with a "
            "--folder that all hosts share."
        )

    def progress_of_each(self, progress: type[T]) -> list[T]:
        """What all complete checkpoints hold, oldest first, without those that cannot be read."""
        found = []
        for folder in self._complete():
            with suppress(KeyError, TypeError, ValueError):
                found.append(_progress(folder, progress))
        return found

    def _complete(self) -> list[Path]:
        """Checkpoints whose files all exist at their full size, oldest first."""
        found = []
        for folder in sorted(self._folder.glob("step-*")):
            if not re.fullmatch(r"step-\d{8}", folder.name):
                continue
            try:
                files = read_json(folder / "progress.json")["files"].items()
                whole = all((folder / name).stat().st_size == size for name, size in files)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            if whole:
                found.append(folder)
        return found


def _progress(folder: Path, progress: type[T]) -> T:
    content = json.dumps(read_json(folder / "progress.json")["progress"])
    return TypeAdapter(progress).validate_json(content, strict=True)
