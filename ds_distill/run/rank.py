"""A process as one rank of a run: it meets the others, is watched, and its failure ends all."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NoReturn

from torch.distributed import DistBackendError, DistError

from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.files import is_disk_full
from ds_distill.process.failures import Failure, Kind, clear_failures, first_failure, record_failure
from ds_distill.process.identity import STOP, get_rank, get_world_size, is_launched, is_rank
from ds_distill.process.lease import Locked, release_all
from ds_distill.process.rendezvous import FAILURE, RanksMissing, Rendezvous, StoreLost
from ds_distill.process.signals import Stopped, print_error
from ds_distill.process.watchdog import GRACE_SECONDS, Watchdog

Report = Literal["own", "printed", "silent"]
"""Of a failure: whether it is this rank's, another's that prints it, or of one that cannot."""

READ_SECONDS = 2.5
"""Time of the others to read a failure from the store, which ends with rank 0."""


class OtherRankFailed(Exception):
    """Another rank's failure has ended this one."""

    def __init__(self, failure: Failure, *, printed: bool) -> None:
        """printed: whether the rank that failed prints it itself."""
        super().__init__(str(failure))
        self.failure, self.printed = failure, printed


@contextmanager
def as_rank(folder: Path, limit: float) -> Iterator[World]:
    """Inside this block the process is a rank of a run: with those that a launcher started, or
    alone.

    folder: the run's, for records of failures. limit: seconds, see `Watchdog`.

    Raises OtherRankFailed in place of an error that another rank's failure has led to.
    """
    if not is_rank() or (get_world_size() == 1 and not is_launched()):
        yield World.start()
        return
    rank = _Rank(folder)
    if rank.number == 0 and is_launched():
        threading.Thread(target=_heed_launch, args=[folder / STOP], daemon=True).start()
    try:
        if get_world_size() == 1:
            yield World.start()
            return
        rendezvous = World.rendezvous_of_group() or Rendezvous.join(limit)
        rank.watchdog = Watchdog(rendezvous, limit, rank.end)
        rank.watchdog.start()
        yield World.start(rendezvous, limit)
        rank.watchdog.finish()
        if rank.number == 0:
            clear_failures(folder)  # of what torchrun started before
    except Exception as error:
        failure, what = rank.judge(error)
        if what == "own":
            raise
        raise OtherRankFailed(failure, printed=what == "printed") from error
    finally:
        if rank.watchdog is not None:
            rank.watchdog.stop()


def _heed_launch(stop: Path) -> None:
    while not stop.exists():
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def report_and_exit(error: Exception) -> NoReturn:
    """End this process, a rank, for an error that `as_rank` has passed on: what ended the run is
    printed once, last."""
    if isinstance(error, OtherRankFailed):
        if not error.printed:
            print_error(str(error.failure))
        # A launcher ends all ranks at the first exit, and that rank is to have printed its error.
        time.sleep(READ_SECONDS + 1)
        os._exit(error.failure.exit_code)
    kind, message = _kind(error)
    own = Failure(get_rank(), socket.gethostname(), time.time(), kind, message)
    if kind == "fault" and not isinstance(error, RanksMissing):
        traceback.print_exception(error)
    if kind != "stopped" or not is_launched():  # a launch says what stopped it
        print_error(str(own) if kind == "fault" else message)
    if own.rank == 0:
        time.sleep(READ_SECONDS)
    # Other ranks may be waiting for this one: exit without waiting for them.
    os._exit(own.exit_code)


class _Rank:
    """This rank, when something fails."""

    def __init__(self, folder: Path) -> None:
        self.number = get_rank()
        self.watchdog: Watchdog | None = None
        self._folder = folder
        self._since = time.time() - 60  # clocks of hosts differ
        self._ending = threading.Lock()

    def judge(self, error: Exception) -> tuple[Failure, Report]:
        """The failure that ends the run, for an error of this rank."""
        self._ending.acquire()  # the watchdog has no more to say
        if self.watchdog is not None and _may_come_from_another(error):
            found = self._of_another()
            if found is not None:
                return found
        kind, message = _kind(error)
        own = Failure(self.number, socket.gethostname(), time.time(), kind, message)
        first = self._publish(own)
        if first != own:
            return first, "printed"
        if not isinstance(error, Locked):  # the folder belongs to another run
            record_failure(self._folder, own)
        return own, "own"

    def end(self, failure: Failure, text: str | None) -> None:
        """End this process from the watchdog's thread."""
        if not self._ending.acquire(blocking=False):
            return  # the main thread is about to
        if text is not None and self._publish(failure) == failure:
            if record_failure(self._folder, failure):
                os.write(2, text.encode())
                print_error(str(failure))
            if self.number == 0:
                time.sleep(READ_SECONDS)
        release_all()
        os._exit(failure.exit_code)

    def _publish(self, own: Failure) -> Failure:
        """The first failure of all ranks, which is this one if there was none before."""
        if self.watchdog is None:
            return own
        try:
            text = json.dumps(asdict(own))
            first = self.watchdog.store.compare_set(FAILURE, "", text).decode()
            return Failure(**json.loads(first))
        except DistError:
            return first_failure(self._folder) or own

    def _of_another(self) -> tuple[Failure, Report] | None:
        """Why another rank ended: by its own record, else by what can be seen of it."""
        assert self.watchdog is not None
        ended = self.watchdog.ended_beside()
        deadline = time.monotonic() + (1.0 if ended else GRACE_SECONDS)
        reachable = True
        while time.monotonic() < deadline:
            if self.watchdog.known is not None:
                return self.watchdog.known, "printed"
            try:
                if reachable and self.watchdog.store.check([FAILURE]):
                    return Failure(**json.loads(self.watchdog.store.get(FAILURE))), "printed"
            except DistError:
                reachable = False
            if (known := first_failure(self._folder)) and known.time > self._since:
                return known, "printed"
            ended = ended or self.watchdog.ended_beside()
            time.sleep(0.1)
        if ended is None and self.number == 0:
            ended = self.watchdog.silent_ranks()
        if ended is None and not reachable:
            ended = self.watchdog.main_lost()
        if ended is None:
            return None
        first = self._publish(ended)
        return first, "silent" if record_failure(self._folder, ended) else "printed"


def _may_come_from_another(error: BaseException) -> bool:
    """Whether an error may be that another rank did not answer, or its connection broke."""
    if isinstance(error, StoreLost | DistError | DistBackendError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)


def _kind(error: Exception) -> tuple[Kind, str]:
    if isinstance(error, UserError):
        return "mistake", str(error)
    if isinstance(error, Stopped):
        return "stopped", str(error)
    if is_disk_full(error):
        file = getattr(error, "filename", None)
        return "mistake", f"no space left on the disk{f' while writing {file}' if file else ''}"
    if isinstance(error, RanksMissing):
        return "fault", str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return "fault", f"{type(error).__name__}: {first}".removesuffix(": ")
