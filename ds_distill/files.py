"""Files that are whole or not there: written aside, synced, renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NO_SPACE = ("no space left on device", "os error 28", "disk quota exceeded", "os error 122")
_WRITE_FAILED = ("pytorchstreamwriter", "inline_container", "requested and")
"""What torch and numpy say when a write ends early; they keep no error number."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception, or one that it came from, means that a disk had no room.

    Libraries wrap the operating system's error in their own types: torch in RuntimeError,
    safetensors in SafetensorError, numpy in an OSError without a number.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        text = str(error).lower()
        if any(words in text for words in _NO_SPACE):
            return True
        if isinstance(error, OSError | RuntimeError) and any(w in text for w in _WRITE_FAILED):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Errors of the operating system within name `place`, where they name no file: a write to a
    file that is open does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file's content at once: a crash leaves the old content or the new."""
    with new_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any, indent: int | None = 2) -> None:
    write_text(path, json.dumps(data, indent=indent, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write aside, which takes its name when the block ends without an error."""
    aside = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        publish_file(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def publish_file(aside: Path, path: Path) -> None:
    """Sync a finished file to disk and give it its name, replacing an older one."""
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill aside, which takes its name when the block ends without an error."""
    aside = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        publish_folder(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish_folder(aside: Path, path: Path) -> None:
    """Sync a finished folder to disk and give it its name, replacing an older one. Its files get
    the rights of any new file there: safetensors gives its own to the owner alone."""
    mode = _mode_of_new_files(aside)
    for path_within in aside.rglob("*"):
        if path_within.is_file():
            path_within.chmod(mode)
        sync(path_within)
    sync(aside)
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        os.rename(aside, path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(aside, path)
    sync(path.parent)


def _mode_of_new_files(folder: Path) -> int:
    """By the umask, which a process can only read by changing it for all its threads."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
