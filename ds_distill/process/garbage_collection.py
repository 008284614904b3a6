"""Python's collection of cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Within, Python looks for no cycles: where much is made that stays, it would go over all of it
    again and again. A fifth of the time of our imports, half of that of parsing docstrings."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
