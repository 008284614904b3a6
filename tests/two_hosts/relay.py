"""`python relay.py NAMESPACE-A NAME-A NAMESPACE-B NAME-B`: a cable between two network namespaces.

It makes an interface in each, and carries frames from one to the other. Its standard input, lines
of JSON, says how well: `[TO-A, TO-B]`, each with the fields of `Way`. It answers each with a line.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000


@dataclass(frozen=True)
class Way:
    """How frames come through in one direction."""

    loss: float = 0.0
    """Share of the frames that are lost; 1: all."""
    delay: float = 0.0
    """Seconds."""
    largest: int = 65536
    """Bytes of the largest that comes through."""
    rate: float | None = None
    """Bytes a second; None: as many as this process carries."""


def tap(namespace: str, name: str) -> int:
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    return end


def main() -> None:
    ends = [tap(*sys.argv[1:3]), tap(*sys.argv[3:5])]
    ways, draw = [Way(), Way()], random.Random(0)
    late: list[tuple[float, int, int, bytes]] = []
    count, free = 0, [0.0, 0.0]  # when the last frame of each direction has been sent
    events = select.poll()
    for source in (0, *ends):
        events.register(source, select.POLLIN)
    print("ready", flush=True)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) * 1000 if late else None
        ready = {file for file, _ in events.poll(wait)}
        if 0 in ready:
            if not (line := sys.stdin.readline()):
                return
            ways = [Way(**one) for one in json.loads(line)]
            print("done", flush=True)
        for number, end in enumerate(ends):
            target = 1 - number
            while end in ready:
                try:
                    frame = os.read(end, 65536)
                except BlockingIOError:
                    break
                way = ways[target]
                if len(frame) <= way.largest and draw.random() >= way.loss:
                    count += 1
                    free[target] = max(free[target], time.monotonic())
                    free[target] += len(frame) / way.rate if way.rate else 0.0
                    heapq.heappush(late, (free[target] + way.delay, count, target, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(late)
            try:
                os.write(ends[target], frame)
            except OSError:  # the interface is down, or its queue full: lost
                continue


if __name__ == "__main__":
    main()
