"""`python -m ds_distill.launch.agent`: the parent of everything that a run starts on one host.

Its standard input is a line of JSON, the order, and then stays open: its end is the order to stop.
So no argument passes a shell and no secret can be read in `ps`, and whatever ends `ds-distill
launch`, or the connection to it, ends the run on this host too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field

from ds_distill.launch.process_group import Command, Group
from ds_distill.process.identity import HOST

STOP = b"stop\n"
STOP_AT_ONCE = b"kill\n"
"""Lines of the input: stop, and stop without SIGTERM and grace. Empty ones are signs of life."""

TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class AgentOrder:
    """What an agent is to run."""

    command: list[str]
    """Arguments of `ds-distill` on each rank."""
    hosts: dict[str, list[int]]
    """The GPUs, or CPU ranks, to use on each host, by its name, in the order of their ranks."""
    node_rank: int | None
    """Which of the hosts the agent is on; None: Slurm knows."""
    master_addr: str
    master_port: int
    directory: str
    """Working folder of the ranks."""
    grace: float
    """Seconds between SIGTERM and SIGKILL."""
    silence: float | None = None
    """Stop when the input gives no sign of life for so many seconds: a lost connection does not
    always end it."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables of the ranks beside those that the agent has; some are secrets."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> AgentOrder:
        return AgentOrder(**json.loads(line))

    def rank_of_node(self) -> int:
        return int(os.environ["SLURM_PROCID"]) if self.node_rank is None else self.node_rank

    def ranks(self) -> list[Command]:
        """The ranks of this agent's host.

        Not through DeepSpeed's launcher of one host: it answers SIGTERM by ending ranks one after
        another, each after 30 seconds at the latest, and ends with 1, whatever they end with. Nor
        through that of torch (elastic): it gives each rank a session of its own, which no group can
        end.
        """
        node = self.rank_of_node()
        host = list(self.hosts)[node]
        before = sum(len(self.hosts[name]) for name in list(self.hosts)[:node])
        slots = self.hosts[host]
        shared = {**os.environ, **self.environment, **self._interface()}
        shared |= _only(slots, shared.get("CUDA_VISIBLE_DEVICES"))
        shared |= {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)}
        shared |= {"WORLD_SIZE": str(sum(map(len, self.hosts.values())))}
        shared |= {"LOCAL_SIZE": str(len(slots)), "LOCAL_WORLD_SIZE": str(len(slots))}
        command = [sys.executable, "-u", "-P", "-m", "ds_distill", *self.command]
        shared[HOST] = host
        return [
            Command(command, {**shared, "RANK": str(before + local), "LOCAL_RANK": str(local)})
            for local in range(len(slots))
        ]

    def _interface(self) -> dict[str, str]:
        named = {**os.environ, **self.environment}
        if len(self.hosts) == 1 or "GLOO_SOCKET_IFNAME" in named:
            return {}
        # Gloo takes the address of this machine's name, which on many is the loopback's.
        name = interface_towards(self.master_addr)
        return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _only(slots: list[int], seen: str | None) -> dict[str, str]:
    """The variable that shows these GPUs alone to the ranks.

    seen: what it is without; all GPUs where there is none.
    """
    if slots == list(range(len(slots))):
        return {}  # a rank takes the GPU of its local rank
    devices = seen.split(",") if seen else [str(slot) for slot in range(max(slots) + 1)]
    if max(slots) >= len(devices):
        sys.exit(f"ds-distill: slot {max(slots)} is to be used, but CUDA_VISIBLE_DEVICES={seen}.")
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot] for slot in slots)}


def interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches another one; None if unknown."""
    import psutil

    try:
        kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = psutil.net_if_addrs().items()
    return next((name for name, found in names if own in [one.address for one in found]), None)


def main() -> int:
    """Returns the exit code of the first rank that failed on this host; 143 where it was stopped
    and all have ended well."""
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    order = AgentOrder.from_line(_read_line())
    os.chdir(order.directory)
    group = Group(order.ranks(), order.grace)
    return watch(group, signals, order.silence)


def watch(group: Group, signals: int, silence: float | None) -> int:
    """Wait for the end of a group, or for an order on standard input to end it."""
    orders = 0
    events = select.poll()
    for source in (group.handle, orders, signals):
        events.register(source, select.POLLIN)
    while True:
        ready = dict(events.poll(silence and silence * 1000))
        if group.handle in ready:
            return group.end()
        given = os.read(orders, 4096) if orders in ready else b""
        if given and STOP not in given and STOP_AT_ONCE not in given:
            continue
        if not ready:
            text = f"no sign of life from `ds-distill launch` for {silence:g} seconds"
            os.write(2, f"ds-distill: {socket.gethostname()}: {text}: stopping.\n".encode())
        return group.end(STOP_AT_ONCE in given, orders if given else None) or TERMINATED


def _read_line() -> bytes:
    """The first line of the standard input, and not a byte more: `watch` polls for the rest."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit(
                "ds_distill.launch.agent: started by `ds-distill launch`, which gives an order"
            )
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
