"""What run.py has done: one archive and one summary in the output folder, whole at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ARCHIVE, SUMMARY = "results.tar.gz", "summary.json"
LOG_BYTES = 2**20
"""Kept of a log's end: what comes back from a machine is limited."""

MEANING = {
    "done": "it ran to its end and its results are good",
    "failed": "it ended with an error, its results are not good, or it reached its limit",
    "cut": "the budget or a signal ended it: what it wrote until then is here, and is partial",
    "running": "it was running when this was written: what is here of it is partial",
    "waiting": "not started yet",
}


class Record:
    """Entries of steps by name, in the order of value. A step without one is waiting."""

    def __init__(self, output: Path, results: Path, names: list[str]) -> None:
        """output: where the archive is kept. results: the folder that steps write into."""
        self.output, self.results, self.names = output, results, names
        self.entries: dict[str, dict[str, Any]] = {}
        output.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(output, os.O_RDONLY)  # of the folder: it ends with the process
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{output}: another call writes there") from error

    def take(self, folder: Path) -> bool:
        """Go on with the archive of a folder. False where it has none."""
        if not (folder / ARCHIVE).is_file():
            return False
        with tarfile.open(folder / ARCHIVE) as archive:
            archive.extractall(self.results, filter="data")
        summary = json.loads((self.results / SUMMARY).read_text())
        for entry in summary["steps"]:
            if entry["state"] == "running":  # whoever ran it was killed
                entry |= {"state": "cut", "outputs": "killed; what it wrote until then is partial"}
            if entry["state"] != "waiting":
                self.entries[entry["step"]] = entry
        return True

    def forget(self, name: str, results: str) -> None:
        """Drop a step's entry and its results: it is to be done anew."""
        self.entries.pop(name, None)
        (self.results / results).unlink(missing_ok=True)

    def state(self, name: str) -> str:
        return str(self.entries.get(name, {"state": "waiting"})["state"])

    def note(self, name: str, state: str, **more: Any) -> None:
        """Set a step's entry and write everything."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.entries[name] = {"step": name, "state": state, "date": now, **more}
        self.save()

    def save(self) -> None:
        """The archive holds the summary too, so that both are of one moment: it alone is read
        when a later call goes on."""
        waiting = [name for name in self.names if name not in self.entries]
        summary = {
            "whole": all(self.state(name) == "done" for name in self.names),
            "steps": [*self.entries.values(), *({"step": n, "state": "waiting"} for n in waiting)],
            "states": MEANING,
        }
        order = {name: number for number, name in enumerate(self.names)}
        summary["steps"].sort(key=lambda entry: order.get(entry["step"], len(order)))
        text = json.dumps(summary, indent=2) + "\n"
        (self.results / SUMMARY).write_text(text)
        aside = self.output / f".{ARCHIVE}.tmp"
        with tarfile.open(aside, "w:gz") as archive:
            for file in sorted(self.results.rglob("*")):
                if file.is_file() and not file.name.startswith("."):
                    archive.add(file, str(file.relative_to(self.results)))
        os.replace(aside, self.output / ARCHIVE)
        aside = self.output / f".{SUMMARY}.tmp"
        aside.write_text(text)
        os.replace(aside, self.output / SUMMARY)


def shorten(log: Path) -> None:
    """Keep the end of a long log."""
    size = log.stat().st_size
    if size > LOG_BYTES:
        with log.open("rb") as file:
            file.seek(size - LOG_BYTES)
            end = file.read()
        log.write_bytes(b"... the beginning was left out\n" + end)
