"""DeepSpeed's compiled collectives for CPU, loaded so that a kill cannot block a later start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import filelock
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory


def load_shared_memory_collectives() -> None:
    """Load what `deepspeed.init_distributed` would load.

    torch takes an extension's folder for locked while a file `lock` is there: a process that is
    killed while it loads leaves it, and every later start waits for ever. Here a lock that ends
    with its process comes first, and who has it removes a file that no process holds open.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return
    folder = Path(_get_build_directory(builder.name, verbose=False))
    with filelock.FileLock(folder / ".ds_distill.lock"):
        lock = folder / "lock"
        if lock.exists() and not _is_open(lock):
            lock.unlink(missing_ok=True)
        with _own_programs_first():
            builder.load(verbose=False)


@contextmanager
def _own_programs_first() -> Iterator[None]:
    """This environment's ninja before the system's, whatever started the process: a ninja of
    another version would compile again what is there, a minute each time they change."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _is_open(file: Path) -> bool:
    """Whether a process of this machine has a file open; where that cannot be told, it has."""
    processes = Path("/proc")
    if not processes.is_dir():
        return True
    wanted = str(file.resolve())
    for descriptors in processes.glob("[0-9]*/fd"):
        try:
            if any(os.readlink(entry) == wanted for entry in descriptors.iterdir()):
                return True
        except OSError:  # another user's, or it has ended meanwhile
            continue
    return False
