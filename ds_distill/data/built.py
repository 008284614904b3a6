"""Files that are made of data once, and then found by all processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from ds_distill.errors import UserError
from ds_distill.files import new_file


def build_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Create a file with `write(temporary path)` unless it exists; returns `target`.

    Of several processes one writes and the others wait. The file appears complete or not at all.

    Raises UserError when the folder cannot be written or its disk is full.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(FileLock(f"{target}.lock")):
            if not target.exists():
                with new_file(target) as temporary:
                    write(temporary)
    except OSError as error:
        raise UserError(
            f"{target.parent}: converted data cannot be written here: "
            f"{error.strerror or error}. Free some space, or set HF_DATASETS_CACHE to a folder "
            "that can be written."
        ) from error
    return target


def _locked(lock: FileLock) -> AcquireReturnProxy:
    """Take a lock that ends with the process that has it; a long wait is announced."""
    try:
        return lock.acquire(timeout=5)
    except Timeout:
        print(f"Waiting for another process that writes {lock.lock_file[:-5]} ...", flush=True)
        return lock.acquire()
