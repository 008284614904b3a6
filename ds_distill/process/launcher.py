"""Processes end with those that have started them, also where these are killed: ranks with
torchrun or DeepSpeed's launcher, neither of which sees to that, and runs with their sweep."""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ds_distill.process.identity import is_rank

_TORCHRUN, _DEEPSPEED = "TORCHELASTIC_RUN_ID", "CROSS_SIZE"
"""Variables that they, and no other launchers, set for ranks."""

_PR_SET_PDEATHSIG = 1


@functools.cache
def end_with_launcher() -> None:
    """To be called as early as possible: of a launcher that ends before, nothing is known. Both
    start ranks in their main thread; of others that is not known, and the kernel's signal comes at
    the end of a thread."""
    if not is_rank():
        return
    if _TORCHRUN not in os.environ and _DEEPSPEED not in os.environ:
        return
    parent = os.getppid()
    command = _command_of(parent) if _DEEPSPEED in os.environ else None
    ends_with(parent)()
    if command is not None:  # `deepspeed` starts the parent, which does not end with it
        threading.Thread(target=_end_with, args=[command, parent], daemon=True).start()


def ends_with(parent: int) -> Callable[[], None]:
    """A function for a child of a process, such as Popen's `preexec_fn`: it gets SIGKILL when that
    one ends. The parent must start it in its main thread."""
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return end_with_parent


def shell_code(code: int) -> int:
    """A child's exit code as shells have it: 128 + N after signal N."""
    return 128 - code if code < 0 else code


def _command_of(launcher: int) -> int | None:
    """The `deepspeed` command that has started a launcher; None where that was another process,
    such as a shell, which may end before."""
    try:
        _, _, rest = Path(f"/proc/{launcher}/stat").read_text(encoding="utf-8").rpartition(")")
        parent = int(rest.split()[1])
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    names = {b"deepspeed", b"ds"}  # both are the same command
    return None if names.isdisjoint(map(os.path.basename, words)) else parent


def _end_with(command: int, parent: int) -> None:
    """Ends the parent, and with it all its ranks, also those that hang."""
    with suppress(ProcessLookupError):
        waits = select.poll()
        waits.register(os.pidfd_open(command), select.POLLIN)
        waits.poll()
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
