"""The ranks of a run and their collectives."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import ds_distill.engine.accelerator  # noqa: F401  # isort: skip  (before deepspeed)
import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from ds_distill.engine.internals import compile_nothing
from ds_distill.errors import UserError
from ds_distill.process.activity import mark_waiting
from ds_distill.process.identity import (
    free_port,
    get_rank,
    get_world_size,
    interface_towards,
    is_rank,
)
from ds_distill.process.rendezvous import Rendezvous

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, and its device."""

    rank: int
    size: int
    device: torch.device
    rendezvous: Rendezvous | None = None
    """Where the ranks meet beside their collectives; None for a lone one."""

    @staticmethod
    def start(rendezvous: Rendezvous | None = None, limit: float = 600.0) -> World:
        """Join the ranks that the launcher started, or be the only rank.

        Ranks on one machine share its cores, unless OMP_NUM_THREADS is set.

        rendezvous: of ranks that have met already.
        limit: seconds after which a rank that waits for another one in a collective gives up.
        """
        global _rendezvous
        if not is_rank():
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        # DeepSpeed calls collectives by deprecated names, once per step.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        local_rank = int(os.environ["LOCAL_RANK"])
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        if on_cpu:  # DeepSpeed would take the number of NUMA nodes for the number of ranks
            os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if "OMP_NUM_THREADS" not in os.environ:
            cores, ranks = len(os.sched_getaffinity(0)), os.environ.get("LOCAL_WORLD_SIZE", "1")
            torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_SIZE", ranks))))
        if not on_cpu:
            local_rank = _own_gpu(local_rank, accelerator.device_count())
            os.environ["LOCAL_RANK"] = str(local_rank)  # DeepSpeed takes it for the GPU's number
            accelerator.set_device(local_rank)
        if not dist.is_initialized():
            with no_chatter():
                compile_nothing()
                backend = accelerator.communication_backend_name()
                # A watchdog at `limit` knows which rank is behind, and has the first word.
                timeout = timedelta(seconds=limit + 60)
                rank, size = get_rank(), get_world_size()
                if size > 1:
                    _choose_interface(size)
                    _rendezvous = rendezvous or Rendezvous.join(limit)
                    torch.distributed.init_process_group(
                        backend,
                        store=_rendezvous.for_process_group(),
                        rank=rank,
                        world_size=size,
                        timeout=timeout,
                    )
                deepspeed.init_distributed(
                    dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
                )
            if size == 1:  # else NCCL warns, as a run's last words, that it was not ended
                atexit.register(World.stop)
        device = torch.device("cpu" if on_cpu else accelerator.device_name(local_rank))
        return World(dist.get_rank(), dist.get_world_size(), device, _rendezvous)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all ranks are here. Work of one rank alone may take long: unlike a collective
        it has no time limit but the watchdog's, which asks whether that rank goes on."""
        if self.rendezvous is not None:
            mark_waiting(True)
            self.rendezvous.barrier(_announce if self.is_main else None)
            mark_waiting(False)

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` returns, JSON values, on every rank. The main process alone does it, and the
        others wait for as long as it goes on, as at a barrier."""
        if self.rendezvous is None:
            return work()
        text = json.dumps(work()) if self.is_main else None
        mark_waiting(True)
        text = self.rendezvous.from_main(text, _announce if self.is_main else None)
        mark_waiting(False)
        found: T = json.loads(text)
        return found

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor on the device over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The distinct content keys of all ranks, int64 [n, 2], on the CPU."""
        counts = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        counts[self.rank] = len(keys)
        ends = self.sum(counts).cumsum(dim=0).tolist()
        together = torch.zeros(ends[-1], 2, dtype=torch.int64, device=self.device)
        together[ends[self.rank] - len(keys) : ends[self.rank]] = keys.to(self.device)
        return self.sum(together).cpu().unique(dim=0)

    @staticmethod
    def rendezvous_of_group() -> Rendezvous | None:
        """Where the ranks of this process's group meet, if it has begun one."""
        return _rendezvous

    @staticmethod
    def stop() -> None:
        global _rendezvous
        if dist.is_initialized():
            dist.destroy_process_group()
        _rendezvous = None


_rendezvous: Rendezvous | None = None
"""Of this process's group, as long as there is one."""


def _own_gpu(local_rank: int, visible: int) -> int:
    """The number of a rank's GPU among those that it sees. Of one GPU it is 0 whatever the rank:
    launchers such as `srun --gpus-per-task=1` show each rank its own alone."""
    if visible > 1 and local_rank >= visible:
        raise UserError(
            f"rank {local_rank} of this host has no GPU: {visible} are visible to it "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). Start no "
            "more ranks on a host than it has GPUs, or show each rank its own GPU alone."
        )
    return 0 if visible == 1 else local_rank


def _choose_interface(size: int) -> None:
    """Of ranks of several hosts: gloo talks over the network on which they meet."""
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    if size > int(here) and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_towards(os.environ["MASTER_ADDR"])
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _announce(missing: str) -> None:
    print(f"  waiting for {missing}", flush=True)


@contextmanager
def no_chatter() -> Iterator[None]:
    """Drop what DeepSpeed prints on standard output: builds, memory use."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
