"""Ranks that DeepSpeed's launcher or torchrun has started end with it, as those of `ds-distill
launch` do. Neither sees to that: after SIGKILL of one its ranks would go on."""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path

from ds_distill.process.identity import LAUNCHED, is_rank

_TORCHRUN, _DEEPSPEED = "TORCHELASTIC_RUN_ID", "CROSS_SIZE"
"""Variables that they, and no other launchers, set for ranks."""

_PR_SET_PDEATHSIG = 1


@functools.cache
def end_with_launcher() -> None:
    """To be called as early as possible: of a launcher that ends before, nothing is known. Both
    start ranks in their main thread; of others that is not known, and the kernel's signal comes at
    the end of a thread."""
    if not is_rank() or LAUNCHED in os.environ:
        return
    if _TORCHRUN not in os.environ and _DEEPSPEED not in os.environ:
        return
    parent = os.getppid()
    command = _command_of(parent) if _DEEPSPEED in os.environ else None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return  # not Linux
    if os.getppid() != parent:
        os._exit(1)
    if command is not None:  # `deepspeed` starts the parent, which does not end with it
        threading.Thread(target=_end_with, args=[command, parent], daemon=True).start()


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
