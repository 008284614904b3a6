"""How long many ranks take to meet, and to pass barriers, on one machine.

    python tools/benchmarks/many_ranks.py [--ranks 512] [--output FILE]

Each rank is a fork that has nothing but its connection to the store: no models, no process group.
Processor time of all ranks is this machine's; of a cluster each host has its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ds_distill.process.rendezvous import Rendezvous

LIMIT, BARRIERS = 300.0, 5


def as_rank(rank: int, ranks: int, port: int, started: float, out: int) -> None:
    """A line of JSON into a pipe: seconds since the start at which it had met the others, and of
    each barrier."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ |= {"LOCAL_RANK": str(rank % 8), "LOCAL_WORLD_SIZE": "8"}
    met = Rendezvous.join(LIMIT)
    seconds = [time.monotonic() - started]
    for number in range(BARRIERS):
        before = time.monotonic()
        text = met.from_main(str(number) if rank == 0 else None)
        assert text == str(number)
        seconds.append(time.monotonic() - before)
    os.write(out, (json.dumps(seconds) + "\n").encode())
    met.barrier()  # the store ends with rank 0
    if rank == 0:
        time.sleep(2)


def measure(ranks: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read, write = os.pipe()
    started, children = time.monotonic(), []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        try:
            as_rank(rank, ranks, port, started, write)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        rows = [json.loads(line) for line in lines]
    for child in children:
        os.waitpid(child, 0)
    assert len(rows) == ranks, f"{len(rows)} of {ranks} came through"
    met, *barriers = (max(of) for of in zip(*rows, strict=True))
    return {"ranks": ranks, "met": met, "forked": min(row[0] for row in rows), "texts": barriers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = measure(given.ranks)
    slowest = max(found["texts"])
    print(f"{given.ranks} ranks met in {found['met']:.1f} s; a text of rank 0: {slowest:.2f} s")
    if given.output:
        from ds_distill.files import write_json
        from ds_distill.run.inputs import describe_environment

        write_json(given.output, {**found, "environment": describe_environment(1, "cpu")})


if __name__ == "__main__":
    main()
