"""A block that was acknowledged is there after a power cut.

A kill does not show this: the kernel keeps what a killed process wrote. Here a file system of
its own, ext4 in a file, is shut down without writing its log, and mounted again.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from cache_files import check_rows, make_keys, published, write_cache

from ds_distill.cache.build_plan import BUILDING
from ds_distill.cache.format import MANIFEST
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError

EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
CLONE_NEWNS = 0x00020000

SCHEMAS = {
    "first": SignalSchema(dtype="float32", classes=3),
    "second": SignalSchema(dtype="float16", classes=5),
}
KEYS = make_keys(60)
BLOCKS = 2 * 15


def in_private_mounts(work: Callable[[], None], error: Path) -> None:
    """Do work in a child whose mounts nobody else sees, and which end with it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "unshare")
            run("mount", "--make-rprivate", "/")
            work()
            code = 0
        except BaseException:
            error.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise AssertionError(error.read_text())


def run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class Disk:
    """An ext4 file system in a file."""

    def __init__(self, folder: Path) -> None:
        self.image, self.mounted = folder / "disk", folder / "mounted"
        self.mounted.mkdir()
        with open(folder / "empty", "wb") as file:
            file.truncate(8 << 20)
        run("mkfs.ext4", "-q", "-F", folder / "empty")
        self.empty = (folder / "empty").read_bytes()

    def mount(self) -> None:
        run("mount", "-o", "loop", self.image, self.mounted)

    def unmount(self) -> None:
        run("umount", self.mounted)

    def new(self) -> None:
        self.image.write_bytes(self.empty)
        self.mount()

    def cut_power(self) -> None:
        folder = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(folder)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for a disk; skips where none can be made."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4 here")

    def attempt() -> None:
        (tmp_path / "attempt").mkdir()
        disk = Disk(tmp_path / "attempt")
        disk.new()
        disk.cut_power()
        disk.unmount()

    try:
        in_private_mounts(attempt, tmp_path / "error")
    except AssertionError as error:
        pytest.skip(f"no loop-mounted ext4 that can be shut down: {str(error).splitlines()[-1]}")
    return tmp_path


def write(path: Path, ledger: Path, syncs: bool) -> None:
    """Write a cache; the ledger, on another disk, gets what was acknowledged."""
    if not syncs:
        os.fsync = lambda file: None  # type: ignore[assignment]
    descriptor = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def acknowledge(teacher: str, number: int) -> None:
        os.write(descriptor, f"{teacher} {number}\n".encode())

    write_cache(path, KEYS, SCHEMAS, block_rows=4, ranks=2, acknowledge=acknowledge)
    os.write(descriptor, b"done\n")


def lost(path: Path, acknowledged: list[str]) -> int:
    """How many of the acknowledged blocks are not there, or not as they were written."""
    if (path / MANIFEST).is_file():
        try:
            CacheReader(path).verify()
            check_rows(path, KEYS, SCHEMAS)
        except UserError:
            return BLOCKS
        return 0
    if "done" in acknowledged or not (path / BUILDING).is_dir():
        return len(acknowledged)
    there = published(path, SCHEMAS)
    return sum(not is_whole(there.get((t, int(n)), b"")) for t, n in map(str.split, acknowledged))


def is_whole(content: bytes) -> bool:
    """Whether a block is as it was written, by the checksum in its schema."""
    try:
        with pa.BufferReader(content) as source:
            noted = pa.ipc.read_schema(source).metadata
            start = source.tell()
    except pa.ArrowInvalid:
        return False
    return xxhash.xxh3_128_hexdigest(content[start:-8]).encode() == noted[b"checksum"]


def trials(place: Path, count: int, seed: int, syncs: bool) -> list[tuple[int, int, bool]]:
    """Power cuts at random moments of a build, the first one when it has just ended. Of each:
    blocks acknowledged, how many of them are lost, and whether the build had ended."""
    outcomes: list[tuple[int, int, bool]] = []

    def work() -> None:
        draw, disk = random.Random(seed), Disk(place)
        path = disk.mounted / "run" / "cache"
        for trial in range(count):
            disk.new()
            ledger = place / f"ledger-{trial}"
            ledger.touch()
            writer = os.fork()
            if writer == 0:
                try:
                    write(path, ledger, syncs)
                finally:
                    os._exit(0)
            lines = draw.randint(0, BLOCKS) if trial else BLOCKS + 1
            deadline = time.monotonic() + 60
            while ledger.read_bytes().count(b"\n") < lines:
                assert time.monotonic() < deadline, "the writer does not write"
                time.sleep(0.0002)
            time.sleep(draw.uniform(0, 0.02) if trial else 0)
            # Before the cut: ext4 may let a sync that it meets on its way return as if it were
            # done (jbd2_complete_transaction no longer finds the aborted transaction).
            acknowledged = ledger.read_text().splitlines()
            disk.cut_power()
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            disk.unmount()
            disk.mount()
            done = "done" in acknowledged
            outcomes.append((len(acknowledged) - done, lost(path, acknowledged), done))
            if syncs:  # and the same call goes on
                write_cache(path, KEYS, SCHEMAS, block_rows=4, ranks=2)
                CacheReader(path).verify()
                check_rows(path, KEYS, SCHEMAS)
                assert not (path / BUILDING).exists()
            disk.unmount()
            (place / "outcomes").write_text(json.dumps(outcomes))

    in_private_mounts(work, place / "error")
    return [tuple(outcome) for outcome in json.loads((place / "outcomes").read_text())]


def test_what_was_acknowledged_survives_power_cuts(place):
    outcomes = trials(place, count=10, seed=1, syncs=True)
    assert outcomes[0] == (BLOCKS, 0, True) and len(outcomes) == 10
    every = sum(blocks for blocks, _, _ in outcomes)
    print(f"blocks acknowledged before 10 power cuts: {every}, lost: {total_lost(outcomes)}")
    assert total_lost(outcomes) == 0
    assert sum(blocks > 0 and not done for blocks, _, done in outcomes) >= 4


def test_without_syncs_the_same_power_cuts_lose_blocks(place):
    """The check of the check."""
    assert total_lost(trials(place, count=5, seed=1, syncs=False)) > 0


def total_lost(outcomes: list[tuple[int, int, bool]]) -> int:
    return sum(lost for _, lost, _ in outcomes)
