"""This process among the ranks that a launcher started; a process by a name that holds on other
hosts and after its process id was given again; ports and addresses at which processes meet. Imports
no deepspeed, for a launcher."""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

PORTS = range(20000, 30000)
"""Ports for ranks to meet at: below those that Linux gives to outgoing connections."""


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str | None:
    """This machine's address by which it reaches another one; None if unknown, or its own alone."""
    try:
        kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ip_address(own).is_loopback else own


def interface_towards(host: str) -> str | None:
    """The network interface of `address_towards`. Gloo would take that of this machine's name,
    which on many is the loopback's."""
    import psutil

    own, names = address_towards(host), psutil.net_if_addrs().items()
    return next((name for name, found in names if own in [one.address for one in found]), None)


LAUNCHED = ".launch.yaml"
"""In a run's folder: the recipe as `ds-distill launch` gives it to its ranks."""
STOP = ".stop"
"""In a run's folder: a word of the launch to its ranks, where signals would not reach them all."""


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ


def is_launched() -> bool:
    """Whether `ds-distill launch` started this process as a rank: it sees to what a user is told. A
    variable would not come to other hosts."""
    return is_rank() and any(os.path.basename(word) == LAUNCHED for word in sys.argv)


def heed_slurm() -> None:
    """Make a task of `srun -n N ds-distill run` a rank, by the variables that torchrun sets."""
    size = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if is_rank() or size == "1" or sys.argv[1:2] not in (["run"], ["cache"]):
        return
    # Such as `node[001-004,7],gpu1`, and `8(x2)`.
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", os.environ["SLURM_STEP_NODELIST"])
    tasks_here = re.match(r"\d+", os.environ["SLURM_STEP_TASKS_PER_NODE"])
    assert first is not None and tasks_here is not None
    job = int(os.environ["SLURM_JOB_ID"]) + int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ |= {
        "RANK": os.environ["SLURM_PROCID"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": tasks_here[0],
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "".join(filter(None, first.groups()))),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(PORTS[job % len(PORTS)])),
    }


def get_rank() -> int:
    """The rank that a launcher gave this process, before ranks have met; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """How many ranks the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_rank() else 1


def restarts() -> int:
    """How often torchrun has started the ranks anew, after one of them had ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True)
class ProcessId:
    """A process."""

    host: str
    """By a name that others may reach it by."""
    pid: int
    born: int | None
    """When it began, in the system's own count; None where that does not tell."""
    machine: str
    """What the process id belongs to: the same on all hosts that share them, see `machine`."""

    @staticmethod
    def of_this() -> ProcessId:
        return ProcessId(socket.gethostname(), os.getpid(), born(os.getpid()), machine())

    def is_alive(self) -> bool | None:
        """Whether it runs; None where only its own host could tell."""
        if self.machine != machine() or self.born is None:
            return None
        return born(self.pid) == self.born


def born(pid: int) -> int | None:
    """When a process began, in ticks since the system did; None where it has ended."""
    try:
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")
    except OSError:
        return None
    fields = rest.split()  # from the third on: the second is a name, with any characters
    return None if fields[0] in "ZX" else int(fields[19])


def machine() -> str:
    """A name for the space of process ids that this process lives in: the kernel's start, and the
    namespace, which differs between containers. A host's name tells neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.getfqdn()
