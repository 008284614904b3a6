"""Why ranks of a run failed: one record per rank in the run's folder, for the process that started
them. Free of torch and deepspeed, so that a launcher reads it at once."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from ds_distill.files import read_text, sync
from ds_distill.process.signals import STOPPED

FOLDER = "failures"
"""In the run's folder."""

Kind = Literal["mistake", "stopped", "fault", "lost"]


@dataclass(frozen=True)
class Failure:
    """Why a rank ended."""

    rank: int
    host: str
    time: float
    """Seconds since 1970, by the clock of the rank's host."""
    kind: Kind
    """`mistake`: the user's input is wrong. `stopped`: a signal, and a checkpoint was saved.
    `fault`: any other error of its own. `lost`: only what another rank's end did to this one."""
    message: str
    """One paragraph, without a traceback."""

    @property
    def exit_code(self) -> int:
        return {"mistake": 2, "stopped": STOPPED}.get(self.kind, 1)

    @property
    def is_final(self) -> bool:
        """Whether a start without a person would come to it again, or is not wanted."""
        return self.kind in ("mistake", "stopped")

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.message}"


_RECORD = TypeAdapter(Failure)


def record_failure(folder: Path, failure: Failure) -> bool:
    """Write a rank's record into the run's folder, which need not exist. Its first one stays: what
    follows is a consequence. Returns whether this is it."""
    path = folder / FOLDER / f"rank-{failure.rank:05d}.json"
    if path.parent.is_symlink():  # a start that is refused for it has a failure to record, too
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(failure)) + "\n")
    except FileExistsError:
        return False
    return True


def failures(folder: Path) -> list[Failure]:
    """All records, the oldest first; a damaged one counts for none."""
    found = map(_read, sorted((folder / FOLDER).glob("rank-*.json")))
    return sorted(filter(None, found), key=lambda failure: failure.time)


def _read(path: Path) -> Failure | None:
    with suppress(OSError, ValueError):
        return _RECORD.validate_json(read_text(path))
    return None


def first_failure(folder: Path) -> Failure | None:
    """The first failure by time, of those that are no consequence of another where there is one;
    None without any."""
    found = failures(folder)
    own = [failure for failure in found if failure.kind != "lost"]
    return next(iter(own or found), None)


def clear_failures(folder: Path, before: float = float("inf")) -> None:
    """Remove the records of an earlier start, and the run's folder where it has nothing else.

    before: only records that are older, in seconds since 1970.
    """
    for path in (folder / FOLDER).glob("rank-*.json"):
        if (one := _read(path)) is None or one.time < before:
            path.unlink(missing_ok=True)
    for path in (folder / FOLDER, folder):
        with suppress(OSError):  # not there, or not empty
            path.rmdir()
            sync(path.parent)
