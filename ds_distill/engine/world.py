"""The processes of a run."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

from ds_distill.engine.extension import load_shared_memory_collectives
from ds_distill.environment import free_port


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @staticmethod
    def start() -> World:
        """Join the run that the launcher started, or be a run of one process.

        Ranks on one machine share its cores; a launcher that sets OMP_NUM_THREADS decides
        itself.
        """
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        # Collectives that DeepSpeed still calls by their old names, once per step.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        local_rank = int(os.environ["LOCAL_RANK"])
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        if on_cpu and "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_SIZE", "1"))))
        if not on_cpu:
            accelerator.set_device(local_rank)
        if not dist.is_initialized():
            with no_chatter():
                if on_cpu:
                    load_shared_memory_collectives()
                deepspeed.init_distributed(
                    dist_backend=accelerator.communication_backend_name(),
                    auto_mpi_discovery=False,
                    verbose=False,
                    timeout=timedelta(hours=6),  # rank 0 tokenises while the others wait
                )
            if on_cpu:
                dist.barrier()  # every rank has opened every buffer
                _unlink_shared_buffer()
        device = torch.device("cpu" if on_cpu else accelerator.device_name(local_rank))
        return World(dist.get_rank(), dist.get_world_size(), local_rank, device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; on the device."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    @staticmethod
    def stop() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _unlink_shared_buffer() -> None:
    """Take this rank's buffer for collectives on CPU out of /dev/shm: it stays mapped as long as
    a process uses it, and DeepSpeed would leave 66 MiB of memory behind at each end of a run."""
    rank, address, port = (os.environ[key] for key in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
    Path("/dev/shm", name).unlink(missing_ok=True)


@contextmanager
def no_chatter() -> Iterator[None]:
    """Drop what DeepSpeed prints on standard output beside its log: builds, memory use."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
