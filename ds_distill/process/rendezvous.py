"""Where the ranks of a run meet, before their process group exists and beside it.

A TCP store on the host of rank 0, at the address and port that the launcher gave. Through it ranks
find out who is missing, wait for rank 0's work without a collective that would time out, and learn
of each other's failures.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

from ds_distill.errors import first_line
from ds_distill.process.activity import Tell
from ds_distill.process.identity import ProcessId, get_rank, get_world_size, restarts
from ds_distill.process.terminal import say

FAILURE = "failure"
"""Key of the first failure of any rank in the store."""

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 60
"""Time of the store for an answer on something that is there."""


class RanksMissing(Exception):
    """Other ranks did not come, or cannot be reached. The message is one paragraph."""


class StoreLost(Exception):
    """Another rank has failed, or the store does not answer any more: rank 0, or the way to its
    host, is gone."""


class Rendezvous:
    """The ranks of a run, as one of them sees the store."""

    def __init__(self, store: PrefixStore, rank: int, processes: list[ProcessId]) -> None:
        """processes: of all ranks."""
        self.store, self.rank, self.processes = store, rank, processes
        self.size = len(processes)
        self._barriers = 0

    @staticmethod
    def join(limit: float) -> Rendezvous:
        """Meet the other ranks that the launcher's environment variables describe.

        limit: seconds that ranks may come after one another.

        Raises RanksMissing, with the names of those that did not come.
        """
        rank, size = get_rank(), get_world_size()
        deadline = time.monotonic() + limit
        store = _open(rank, deadline, limit)
        store.set(f"process/{rank}", json.dumps(asdict(ProcessId.of_this())))
        store.set(f"at/{rank}", "0")
        store.set(f"beat/{rank}", "[0, {}]")
        store.add("come", 1)
        if rank == 0:
            processes = _wait_for_all(store, size, deadline, limit)
            store.set("met", json.dumps([asdict(process) for process in processes]))
        try:
            met = json.loads(store.get("met"))  # rank 0 says whom it waits for
        except (DistNetworkError, DistStoreError) as error:
            raise StoreLost("rank 0 ended before all ranks were there") from error
        if isinstance(met, str):
            raise RanksMissing(met)
        return Rendezvous(store, rank, [ProcessId(**process) for process in met])

    def connect(self) -> PrefixStore:
        """Another connection to the store, for another thread: an operation that waits blocks the
        others of its connection."""
        store = self.store.underlying_store
        assert isinstance(store, TCPStore)
        timeout = timedelta(seconds=_ANSWER_SECONDS)
        return _of_attempt(TCPStore(store.host, store.port, is_master=False, timeout=timeout))

    def for_process_group(self) -> PrefixStore:
        return PrefixStore("process-group", self.store)

    def barrier(self, report: Callable[[str], None] | None = None) -> None:
        """Wait for all ranks, for as long as they live: a watchdog ends a wait for one that does
        not go on.

        report: called with what is waited for, where that takes long.

        Raises StoreLost.
        """
        self._barriers += 1
        number, tell, pause = self._barriers, Tell(), 0.001
        try:
            self.store.set(f"at/{self.rank}", str(number))
            if self.store.add(f"barrier/{number}", 1) == self.size:
                self.store.set(f"barrier/{number}/done", "1")
            while not self.store.check([f"barrier/{number}/done"]):
                if self.store.check([FAILURE]):
                    raise StoreLost("another rank has failed")
                time.sleep(pause)
                pause = min(_POLL_SECONDS, pause * 1.5)
                if report and tell.is_time():
                    report(self.names(self.behind(number)))
            if self.rank == 0 and number > 1:  # all have left the one before
                for key in (f"barrier/{number - 1}", f"barrier/{number - 1}/done"):
                    self.store.delete_key(key)
                self.store.delete_key(f"from-main/{number - 1}")
        except (DistNetworkError, DistStoreError) as error:
            raise StoreLost(str(error)) from error

    def from_main(self, text: str | None, report: Callable[[str], None] | None = None) -> str:
        """A text of rank 0 on every rank; a barrier. text: None on the others. Raises as it."""
        key = f"from-main/{self._barriers + 1}"
        try:
            if text is not None:
                self.store.set(key, text)
            self.barrier(report)
            return self.store.get(key).decode()
        except (DistNetworkError, DistStoreError) as error:
            raise StoreLost(str(error)) from error

    def behind(self, barrier: int) -> list[int]:
        """The ranks that have not come to a barrier."""
        numbers = self.store.multi_get([f"at/{rank}" for rank in range(self.size)])
        return [rank for rank, number in enumerate(numbers) if int(number) < barrier]

    def names(self, ranks: list[int]) -> str:
        return named([(rank, self.processes[rank].host) for rank in ranks])


def named(ranks: list[tuple[int, str | None]]) -> str:
    """Ranks with their hosts, in words."""
    by_host: dict[str | None, list[int]] = {}
    for rank, host in ranks:
        by_host.setdefault(host, []).append(rank)
    return "; ".join(
        f"{'rank' if len(some) == 1 else 'ranks'} {_ranges(some)}" + (f" on {host}" if host else "")
        for host, some in by_host.items()
    )


def _ranges(numbers: list[int]) -> str:
    """E.g. `0-2, 5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def minutes(seconds: float) -> str:
    count, unit = (seconds / 60, "minute") if seconds >= 60 else (seconds, "second")
    return f"{count:.3g} {unit}{'' if count == 1 else 's'}"


def _uses_agents_store() -> bool:
    """Whether torchrun's agent has a store at that port already."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _of_attempt(store: TCPStore) -> PrefixStore:
    """torchrun's store outlives ranks that it starts anew: they do not read the dead ones' keys."""
    return PrefixStore(f"attempt/{restarts() if _uses_agents_store() else 0}", store)


def _open(rank: int, deadline: float, limit: float) -> PrefixStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and not _uses_agents_store()
    if not serves:
        _wait_for_port(rank, host, port, deadline, limit)
    try:
        return _of_attempt(
            TCPStore(
                host,
                port,
                is_master=serves,
                timeout=timedelta(seconds=limit + _ANSWER_SECONDS),  # collectives begin through it
                wait_for_workers=False,
            )
        )
    except (DistNetworkError, DistStoreError) as error:
        what = (
            f"cannot listen on port {port}"
            if serves
            else f"cannot use what answers at {host}:{port}"
        )
        raise RanksMissing(
            f"{what}. If another program has it, give the launcher another one (--master-port; "
            f"DeepSpeed's: --master_port): {first_line(error)}"
        ) from error


def _wait_for_port(rank: int, host: str, port: int, deadline: float, limit: float) -> None:
    tell = Tell()
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise RanksMissing(
                f"rank 0 does not answer at {host}:{port} after {minutes(limit)} ({reason}). See "
                f"whether it runs, and whether {socket.gethostname()} resolves and reaches {host} "
                "(name, firewall, network interface)."
            )
        tell(f"rank {rank} waits for rank 0 at {host}:{port} ({reason}), at most {minutes(limit)}")
        time.sleep(_POLL_SECONDS)


def _wait_for_all(store: PrefixStore, size: int, deadline: float, limit: float) -> list[ProcessId]:
    tell = Tell()
    while store.add("come", 0) < size:
        late = time.monotonic() > deadline
        if late or tell.is_time():
            there = [rank for rank in range(size) if store.check([f"process/{rank}"])]
            hosts = dict(zip(there, _processes(store, there), strict=True))
            known = {rank: process.host for rank, process in hosts.items()}
            missing = named(
                [(rank, _expected_host(rank, known)) for rank in range(size) if rank not in known]
            )
            if late:
                message = (
                    f"{missing}: did not come within {minutes(limit)}. There are: "
                    f"{named(list(known.items()))}. Look at the output of the missing ones: "
                    f"whether they were started, and reach {os.environ['MASTER_ADDR']}:"
                    f"{os.environ['MASTER_PORT']}."
                )
                store.set("met", json.dumps(message))
                time.sleep(2)  # for the others to read it: the store ends with this process
                raise RanksMissing(message)
            say(f"ds-distill: waiting for {missing}, at most {minutes(limit)}")
        time.sleep(_POLL_SECONDS)
    return _processes(store, range(size))


def _processes(store: PrefixStore, ranks: Sequence[int]) -> list[ProcessId]:
    found = store.multi_get([f"process/{rank}" for rank in ranks])
    return [ProcessId(**json.loads(each)) for each in found]


def _expected_host(rank: int, known: dict[int, str]) -> str | None:
    """The host of a rank that has not come, where a rank beside it has: launchers give each host as
    many ranks, one after the other."""
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    beside = [
        host for other, host in known.items() if other // ranks_per_host == rank // ranks_per_host
    ]
    return beside[0] if beside else f"node {rank // ranks_per_host}"
