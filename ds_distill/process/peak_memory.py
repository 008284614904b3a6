"""The most memory that this process has held since a phase, or a training in it, began; and errors
that mean that memory ran out, of a device or of the machine."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path

import torch

from ds_distill.errors import causes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """On a GPU the bytes that torch has allocated there, elsewhere those of the process that are in
    memory."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._before = 0
        """Within the phase, until its last training began."""

    def begin_phase(self) -> None:
        self._reset()
        self._before = 0

    def begin_training(self) -> None:
        self._before = self.of_phase() or 0
        self._reset()

    def of_training(self) -> int | None:
        """Bytes; None where the system does not say."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        return resident_peak()

    def of_phase(self) -> int | None:
        """Likewise."""
        now = self.of_training()
        return None if now is None else max(now, self._before)

    def _reset(self) -> None:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            forget_resident_peak()


def resident_peak() -> int | None:
    """Most bytes of this process in memory, code and data included, since `forget_resident_peak`;
    None where the system does not say. It takes milliseconds."""
    with suppress(OSError):  # Linux alone has it
        if found := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None


def forget_resident_peak() -> None:
    with suppress(OSError):
        _CLEAR.write_text("5")  # resets VmHWM alone


_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",  # of cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, means that memory ran out. Libraries have their
    own types for it: torch raises RuntimeErrors."""
    for cause in causes(error):
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
        text = str(cause).lower()
        if isinstance(cause, OSError | RuntimeError) and any(m in text for m in _MESSAGES):
            return True
    return False
