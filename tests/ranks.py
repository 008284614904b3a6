"""Ranks under test, started one by one without a launcher, so that each can be stopped, killed or
left out; and what is planted in them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType

from processes import marked

from ds_distill.process.identity import free_port

PLANT = """
import os, sys, threading, time

def plant():
    what, rank, step = os.environ["DS_DISTILL_TEST_PLANT"].split(":")
    if rank != os.environ.get("RANK"):
        return
    if what == "die":  # as soon as the ranks have met
        while "torch.distributed" not in sys.modules:
            time.sleep(0.01)
        time.sleep(0.5)
        import torch.distributed
        while not torch.distributed.is_initialized():
            time.sleep(0.001)
        os.kill(os.getpid(), 9)
    while "ds_distill.training.loop" not in sys.modules:
        time.sleep(0.01)
    if what == "slow":
        from ds_distill.run.folder import RunFolder
        read = RunFolder.read_record
        RunFolder.read_record = lambda *given: time.sleep(0.2) or read(*given)
        return
    if what == "late":
        late()
        return
    time.sleep(0.2)
    from ds_distill.training.loop import _Training
    collate = _Training._collate

    def planted(self, epoch, item):
        if item[0] == int(step):
            if what == "hang":
                planted_hang()
            if what == "hold":
                import ctypes
                ctypes.PyDLL(None).sleep(600)  # without giving the interpreter free
            if what == "memory":
                import torch
                torch.empty(1 << 60, dtype=torch.uint8)
            raise ValueError("planted here")
        return collate(self, epoch, item)

    _Training._collate = planted

def late():  # that a file was not there is remembered for a while, as NFS does
    import ds_distill.phases.cache as cache
    from ds_distill.training.checkpoints import Checkpoints
    known, complete, absent, looked = cache.known_teachers, Checkpoints._complete, {}, []

    def known_late(path):
        if path in absent and time.monotonic() - absent[path] < 30:
            return {}
        found = known(path)
        if not found:
            absent.setdefault(path, time.monotonic())
        return found

    def complete_late(self):
        looked.append(self)
        return complete(self)[: -1 if len(looked) < 3 else None]

    cache.known_teachers, Checkpoints._complete = known_late, complete_late

def planted_hang():
    while True:
        time.sleep(0.01)

if "DS_DISTILL_TEST_PLANT" in os.environ:
    threading.Thread(target=plant, daemon=True).start()
"""
"""A sitecustomize.py that makes a rank misbehave: `hang:1:5` hangs rank 1 at step 5. With `slow`
it is slow to look what the run has done before, and with `late` it sees files late."""


def with_plants(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment of processes that heed DS_DISTILL_TEST_PLANT."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(PLANT)
    path = [str(site), environment.get("PYTHONPATH", "")]
    return {**environment, **marked(), "PYTHONPATH": ":".join(filter(None, path))}


class Ranks:
    """Ranks of one recipe."""

    def __init__(self, recipe: Path, environment: dict[str, str], *options: str) -> None:
        self.environment = with_plants(environment, recipe.parent)
        self._recipe, self._options = recipe, options

    def start(
        self,
        folder: Path,
        *more: str,
        ranks: tuple[int, ...] = (0, 1),
        size: int = 2,
        plant: str = "",
        rank_options: Mapping[int, Sequence[str]] = MappingProxyType({}),
        rank_folders: Mapping[int, Path] = MappingProxyType({}),
    ) -> list[subprocess.Popen[str]]:
        """Start some of the ranks, `size` in all. rank_options, rank_folders: more options, and
        another current folder, of some ranks."""
        port = free_port()
        command = [sys.executable, "-P", "-m", "ds_distill", "run", str(self._recipe)]
        command += [*self._options, *more, "--folder", str(folder)]
        return [
            subprocess.Popen(
                [*command, *rank_options.get(rank, ())],
                env={
                    **self.environment,
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
                    **{
                        "LOCAL_SIZE": str(size),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    },
                    **({"DS_DISTILL_TEST_PLANT": plant} if plant else {}),
                },
                cwd=rank_folders.get(rank, folder.parent),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]


def run_ranks(
    arguments: list[str], size: int, environment: dict[str, str], cwd: Path, timeout: float = 600
) -> str:
    """Run a Python file as each of `size` ranks of this machine, without a launcher, whose two
    processes would import torch as well. Returns their output; all must end well.

    arguments: of Python.
    """
    group = {"WORLD_SIZE": str(size), "LOCAL_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = str(free_port())
    with ExitStack() as files:
        # Not pipes: a rank whose pipe is full would wait for us while we wait for another.
        outputs = [files.enter_context(TemporaryFile("w+")) for _ in range(size)]
        started = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**environment, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            codes = [process.wait(timeout) for process in started]
        finally:
            for process in started:
                process.kill()
        for output in outputs:
            output.seek(0)
        said = [output.read() for output in outputs]
    assert codes == [0] * size, "\n".join(text[-4000:] for text in said)
    return "\n".join(said)
