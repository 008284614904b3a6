"""Errors that mean that memory ran out, of a device or of the machine."""

from __future__ import annotations

import errno

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
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        text = str(error).lower()
        if isinstance(error, OSError | RuntimeError) and any(m in text for m in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False
