"""A training's checkpoints: whole or not there, the newest two kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.files import publish_folder, read_json, write_json

KEPT = 2


class Checkpoints:
    """Checkpoints `step-N` of one training, on a file system that all ranks see."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world = folder, world

    def save(self, engine: Engine, step: int, progress: dict[str, Any]) -> None:
        """Every rank writes its part aside; then the checkpoint gets its name."""
        final = self._folder / f"step-{step:08d}"
        aside = self._folder / f".step-{step:08d}.tmp"
        if self._world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        self._world.barrier()
        try:
            engine.save(aside)
            if self._world.is_main:
                files = {
                    str(file.relative_to(aside)): file.stat().st_size
                    for file in sorted(aside.rglob("*"))
                    if file.is_file()
                }
                write_json(
                    aside / "progress.json",
                    {"ranks": self._world.size, "progress": progress, "files": files},
                )
                publish_folder(aside, final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # on a full disk it is in the way
            raise
        if self._world.is_main:
            for old in self._whole()[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        self._world.barrier()

    def load(self, engine: Engine) -> dict[str, Any] | None:
        """Continue from the newest whole checkpoint: its progress, or None without one.

        Raises UserError when it was written by another number of ranks.
        """
        if self._world.is_main and self._folder.is_dir():
            for leftover in self._folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._world.barrier()
        whole = self._whole()
        if not whole:
            return None
        state = read_json(whole[-1] / "progress.json")
        if state["ranks"] != self._world.size:
            raise UserError(
                f"checkpoint {whole[-1]} was written by {state['ranks']} rank(s) and the run now "
                f"has {self._world.size}. Resume with --num-gpus {state['ranks']}."
            )
        engine.load(whole[-1])
        return dict(state["progress"])

    def _whole(self) -> list[Path]:
        """Checkpoints whose files are all there in full, oldest first."""
        found = []
        for folder in sorted(self._folder.glob("step-*")):
            if not re.fullmatch(r"step-\d{8}", folder.name):
                continue
            listed = folder / "progress.json"
            if listed.is_file() and all(
                (folder / name).is_file() and (folder / name).stat().st_size == size
                for name, size in read_json(listed)["files"].items()
            ):
                found.append(folder)
        return found
