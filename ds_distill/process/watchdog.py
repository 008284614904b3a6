"""A watch over the ranks of a run: each one shows signs of progress, and none waits without end.

A thread of every rank writes into the ranks' store, once a second, what the rank does. Rank 0 reads
it: when no rank has gone on for a while, or one gives no sign at all, it names the rank that is
behind, with its stack, and the run ends. A rank whose process has ended is seen at once by those on
the same host.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from ds_distill.process.activity import Activity, activity
from ds_distill.process.failures import Failure
from ds_distill.process.rendezvous import FAILURE, Rendezvous, minutes

GRACE_SECONDS = 5.0
"""Time of a rank's own main thread to end after another rank has failed."""

KILLED = ", as when the system kills it because memory runs out"

_STACK_FRAMES = 12


class Watchdog:
    """Watches a rank, and on rank 0 all of them."""

    def __init__(
        self, rendezvous: Rendezvous, limit: float, end: Callable[[Failure, str | None], None]
    ) -> None:
        """
        limit: seconds without a sign of progress, of any rank, after which the run is ended.
        end: ends this process for a failure, in the watchdog's thread. Its second argument is what
            to print besides, None where another rank prints.
        """
        self._rendezvous, self._limit, self._end = rendezvous, limit, end
        self.store = rendezvous.connect()
        self._tick = min(1.0, limit / 10)
        self._stopped = threading.Event()
        self._contact = time.monotonic()
        self._lost = False
        self._ends = False
        self.known: Failure | None = None
        """The first failure of any rank, once there is one."""
        self._watch = _Watch(rendezvous, limit) if rendezvous.rank == 0 else None
        self._threads = [
            threading.Thread(target=work, daemon=True, name="watchdog")
            for work in (self._exchange, self._guard)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """The rank's work is done: wait for the others, whose ends are then no failures."""
        self._ends = True
        self._rendezvous.barrier()
        self.stop()

    def stop(self) -> None:
        self._stopped.set()

    def ended_beside(self) -> Failure | None:
        """A rank of this host whose process has ended, if there is one."""
        for rank, process in enumerate(self._rendezvous.processes):
            if rank != self._rendezvous.rank and process.is_alive() is False:
                return self._failure(rank, f"its process ended without an error of its own{KILLED}")
        return None

    def silent_ranks(self) -> Failure | None:
        """Rank 0: a rank that gives no sign for some seconds, if there is one."""
        assert self._watch is not None
        before = time.monotonic()
        time.sleep(max(GRACE_SECONDS, 3 * self._tick))
        rank = self._watch.silent_since(before)
        if rank is None:
            return None
        return self._failure(rank, "it cannot be reached any more, and left no error of its own")

    def main_lost(self) -> Failure:
        """The failure of a rank 0 whose store does not answer."""
        return self._failure(0, "it ended or cannot be reached any more, and left no error")

    def _failure(self, rank: int, message: str) -> Failure:
        last = ""
        with suppress(DistNetworkError, DistStoreError):
            if not self._lost and self.store.check([f"beat/{rank}"]):
                last = f". Last seen: {_activity(self.store.get(f'beat/{rank}'))[1]}"
        host = self._rendezvous.processes[rank].host
        return Failure(rank, host, time.time(), "fault", message + last)

    # ------------------------------------------------------------------------- threads

    def _exchange(self) -> None:
        """Write this rank's signs, read the others' failures."""
        store, rank = self.store, self._rendezvous.rank
        beats = 0
        try:
            while not self._stopped.is_set():
                beats += 1
                store.set(f"beat/{rank}", json.dumps([beats, asdict(activity())]))
                if store.check(["stack-of"]) and store.get("stack-of") == b"%d" % rank:
                    store.set(f"stack/{rank}", stacks())
                if self._watch is not None:
                    self._judge(self._watch)
                elif store.check([FAILURE]):
                    self._end_with(store)
                self._contact = time.monotonic()
                # Where this thread cannot run, because another one holds the interpreter, the
                # system's own timer prints the stack.
                faulthandler.dump_traceback_later(self._limit * 0.9, file=2)
                self._stopped.wait(self._tick)
        except (DistNetworkError, DistStoreError):
            self._lost = True
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end_with(self, store: PrefixStore) -> None:
        """Another rank has failed: end, if the main thread does not."""
        self.known = Failure(**json.loads(store.get(FAILURE)))
        if not self._stopped.wait(GRACE_SECONDS):
            self._end(self.known, None)

    def _judge(self, watch: _Watch) -> None:
        """Rank 0: end the run where a rank hangs, or another one has failed."""
        store = self.store
        if store.check([FAILURE]):
            self._end_with(store)
            return
        watch.read(store)
        rank = watch.silent_since(time.monotonic() - self._limit)
        if rank is not None:
            self._hangs(rank, f"it has given no sign for {minutes(self._limit)}", "")
        elif (rank := watch.behind()) is not None:
            where = f"\nWhere rank {rank} is:\n{self._stack_of(rank)}"
            text = f"no rank has gone on for {minutes(self._limit)}, and it is behind"
            self._hangs(rank, text, where)

    def _hangs(self, rank: int, what: str, where: str) -> None:
        failure = self._failure(rank, what)
        longer = "If that only needs longer, set timeout_minutes"
        if not self._stopped.is_set():
            self._end(replace(failure, message=f"{failure.message}. {longer}"), where)

    def _stack_of(self, rank: int) -> str:
        if rank == self._rendezvous.rank:
            return stacks()
        self.store.set("stack-of", str(rank))
        deadline = time.monotonic() + max(GRACE_SECONDS, 4 * self._tick)
        while time.monotonic() < deadline:
            if self.store.check([f"stack/{rank}"]):
                return self.store.get(f"stack/{rank}").decode()
            time.sleep(self._tick / 4)
        return "  it does not answer; if it can, its own output has the stack"

    def _guard(self) -> None:
        """See what the exchange cannot: that it is stuck itself, and that a process has ended."""
        gone_since: float | None = None
        while not self._stopped.wait(self._tick):
            if self._ends:
                continue
            now = time.monotonic()
            ended = self.ended_beside()
            silent = self._lost or now - self._contact > self._limit
            gone_since = (gone_since or now) if ended or silent else None
            # The main thread sees most ends by itself, and knows more.
            if gone_since is not None and now - gone_since > GRACE_SECONDS:
                self._end(ended or self.main_lost(), "")


class _Watch:
    """What rank 0 knows of each rank, by its own clock."""

    def __init__(self, rendezvous: Rendezvous, limit: float) -> None:
        now = time.monotonic()
        self._limit, self._size = limit, rendezvous.size
        self._known: dict[int, tuple[int, Activity]] = {}
        self._seen = [now] * rendezvous.size
        self._moved = [now] * rendezvous.size

    def read(self, store: PrefixStore) -> None:
        told = store.multi_get([f"beat/{rank}" for rank in range(self._size)])
        for rank, (beats, its) in enumerate(map(_activity, told)):
            before = self._known.get(rank)
            now = time.monotonic()
            if before is None or beats != before[0]:
                self._seen[rank] = now
            if before is None or its.marks != before[1].marks:
                self._moved[rank] = now
            self._known[rank] = beats, its

    def silent_since(self, since: float) -> int | None:
        """The rank that has given no sign since a time for longest."""
        rank = min(range(self._size), key=lambda rank: self._seen[rank])
        return rank if self._seen[rank] < since else None

    def behind(self) -> int | None:
        """The rank that the others wait for, where none has gone on for the limit."""
        if time.monotonic() - max(self._moved) < self._limit:
            return None
        activities = [self._known.get(rank, (0, Activity()))[1] for rank in range(self._size)]
        return min(
            range(self._size),
            key=lambda rank: (activities[rank].position, activities[rank].waits, rank),
        )


def _activity(told: bytes) -> tuple[int, Activity]:
    """How often a rank has given a sign of life, and what it does."""
    beats, fields = json.loads(told)
    return beats, Activity(**fields)


def stacks() -> str:
    """Where the threads of this process that do the run's work are, the main thread last."""
    frames, main = sys._current_frames(), threading.main_thread()
    working = [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]
    return "".join(
        f"  thread {thread.name}:\n{''.join(traceback.format_stack(frame)[-_STACK_FRAMES:])}"
        for thread in (*working, main)
        if thread.ident is not None and (frame := frames.get(thread.ident)) is not None
    )
