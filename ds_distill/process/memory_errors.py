"""Errors that mean that memory ran out, of a device or of the machine."""

from __future__ import annotations

import errno

from ds_distill.errors import causes

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
