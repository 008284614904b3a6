"""Atomic files and folders: written under a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from ds_distill.errors import UserError, causes

_NO_SPACE = ("no space left on device", "os error 28", "disk quota exceeded", "os error 122")
_WRITE_FAILED = ("pytorchstreamwriter", "inline_container", "requested and")
"""Messages of torch and numpy when a write ends early; they set no errno."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, means that a disk was full.

    Libraries wrap the operating system's error in their own types: torch in RuntimeError,
    safetensors in SafetensorError, numpy in an OSError without errno.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        text = str(cause).lower()
        if any(message in text for message in _NO_SPACE):
            return True
        if isinstance(cause, OSError | RuntimeError) and any(w in text for w in _WRITE_FAILED):
            return True
    return False


def files_beside(path: Path) -> list[str]:
    """Names in the folder of a path, which may be there or not."""
    return os.listdir(path.parent) if os.path.isdir(path.parent) else []


def is_file(path: Path) -> bool:
    """Whether a path from a user is a file; one that is too long for a path is none."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def why_unwritable(folder: Path) -> str | None:
    """Why a folder cannot be made or written to, in words; None where it seems that it can."""
    # The folder itself where it is there: of a container's mount the parent is not writable.
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        return None
    what = "is not writable" if there.is_dir() else "is a file"
    verb = "written" if there == folder else "created"
    return f"cannot be {verb}, because {there} {what}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set `filename` of an OSError in this block to `path`, if it names no file: errors of writes
    to an open file do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a crash leaves the old content or the new."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any, indent: int | None = 2) -> None:
    write_text(path, json.dumps(data, indent=indent, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(read_text(path))


def read_text(path: Path, errors: str = "strict") -> str:
    """A file's text. Raises OSError for a pipe or a device, which may have no end."""
    if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_text(encoding="utf-8", errors=errors)


def checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def kind_of_node(path: Path) -> str | None:
    """What a path is, in words: of a link not what it points to. None where nothing is there."""
    if path.is_symlink():
        return "a link"
    kinds = {"a file": path.is_file, "a folder": path.is_dir, "a device or a pipe": path.exists}
    return next((kind for kind, is_one in kinds.items() if is_one()), None)


def refuse_links_out(folder: Path) -> None:
    """Raises UserError where anything in a folder is a link to outside of it, or is neither a file
    nor a folder. What is written or removed there would be elsewhere, and a pipe is waited for
    without end. The folder itself may be a link, such as to another disk."""
    root = os.path.realpath(folder)
    waiting = [root]
    while waiting:
        try:
            within = list(os.scandir(waiting.pop()))
        except OSError:  # removed by another process, or not for this one to read or write
            continue
        for entry in within:
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if os.path.commonpath([root, target]) != root:
                    raise UserError(
                        f"{entry.path}: is a link to {target}, which is outside of {folder}: "
                        "nothing there is written or removed through it. Remove the link, and put "
                        "the files themselves in its place."
                    )
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                raise UserError(
                    f"{entry.path}: is {kind_of_node(Path(entry.path))}, and {folder} holds files "
                    "and folders alone. Remove it."
                )


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path to write; it is renamed to `path` when the block ends without an error. It
    gets the mode of a new file there: safetensors makes its own readable only by the owner.

    Raises UserError where `path` is anything but a regular file, which a rename would replace.
    """
    _refuse_others(path, "a file")
    check_guards()
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.unlink(missing_ok=True)  # of a process that was killed
    mode = _mode_of_new_file(temporary)
    try:
        yield temporary
        temporary.chmod(mode)
        publish_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


guards: list[Callable[[], None]] = []
"""Called before anything is written: whether this process still has the folder it writes to."""


def check_guards() -> None:
    for guard in guards:
        guard()


def publish_file(temporary: Path, path: Path) -> None:
    """Sync a finished file and rename it to `path`, replacing an older one. Raises UserError where
    `path` is anything but a regular file."""
    _refuse_others(path, "a file")
    check_guards()
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it is renamed to `path` when the block ends without an error."""
    check_guards()
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, path: Path) -> None:
    """Sync a finished folder and rename it to `path`, replacing an older one. Its files get the
    mode of new files there: safetensors makes its own readable only by the owner.

    A process that is killed between two renames leaves the older one as `.NAME.old`, whole.

    Raises UserError where `path` is anything but a folder.
    """
    _refuse_others(path, "a folder")
    check_guards()
    mode = _mode_of_new_file(temporary / ".mode")
    (temporary / ".mode").unlink()
    for path_within in temporary.rglob("*"):
        if path_within.is_file():
            path_within.chmod(mode)
        sync(path_within)
    sync(temporary)
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(temporary, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _refuse_others(path: Path, kind: str) -> None:
    """Raises UserError where a rename to `path` would replace what is not of this kind."""
    if (found := kind_of_node(path)) not in (None, kind):
        raise UserError(f"{path}: is {found}, and only {kind} is replaced. Name another path.")


def _mode_of_new_file(path: Path) -> int:
    """Make an empty file. Its mode is by the umask, which a process can only read by changing it
    for all its threads."""
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def sync(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
