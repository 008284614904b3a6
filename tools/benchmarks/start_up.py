"""What the start of a run costs per rank and as a whole: files that a rank reads to import the
project, and the time in which N ranks meet and pass a barrier.

    python tools/benchmarks/start_up.py --output tests/results/start-up.json

All ranks are forked from one process on this machine and share its cores, so that with many ranks
the seconds are an upper bound of what the store needs. Between hosts nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ds_distill.engine.accelerator  # isort: skip  (before deepspeed)
import transformers.models.bert.modeling_bert  # noqa: F401

import ds_distill.phases.distil
import ds_distill.run.execute  # noqa: F401
from ds_distill.files import write_json
from ds_distill.process.identity import free_port
from ds_distill.process.rendezvous import Rendezvous
from ds_distill.run.inputs import describe_environment

RANKS = (8, 64)
ROUNDS, BARRIERS, LIMIT = 3, 10, 300.0


def imported() -> dict[str, Any]:
    """Files that Python and the loader have read in this process."""
    named = [
        getattr(module, name, None)
        for module in list(sys.modules.values())
        for name in ("__file__", "__cached__")
    ]
    modules = {name for name in named if isinstance(name, str) and os.path.isfile(name)}
    lines = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split()[-1] for line in lines if ".so" in line.split()[-1]}
    sources = {name for name in modules if name.endswith((".py", ".pyc"))}
    return {
        "modules": len({name for name in sources if name.endswith(".py")}),
        "module_bytes": sum(os.path.getsize(name) for name in sources),
        "libraries": len(libraries),
        "library_bytes": sum(os.path.getsize(name) for name in libraries if os.path.isfile(name)),
    }


def one_rank(rank: int, size: int, port: int, writer: int) -> None:
    """Meets the others; the last rank writes what it took."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    started = time.monotonic()
    rendezvous = Rendezvous.join(LIMIT)
    rendezvous.barrier()
    met = time.monotonic()
    for _ in range(BARRIERS):
        rendezvous.barrier()
    each = (time.monotonic() - met) / BARRIERS
    if rank == size - 1:
        os.write(writer, f"{met - started} {each}".encode())
    rendezvous.barrier()
    if rank == 0:
        time.sleep(1)  # the store ends with this process


def meet(size: int) -> tuple[float, float]:
    """Seconds until all have met, as the last rank sees it, and of a barrier after that."""
    port = free_port()
    reader, writer = os.pipe()
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            code = 1
            try:
                one_rank(rank, size, port, writer)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    os.close(writer)
    answer = os.read(reader, 100).decode()
    os.close(reader)
    assert codes == {0} and answer, codes
    seconds, barrier = answer.split()
    return float(seconds), float(barrier)


def spread(values: list[float]) -> dict[str, float]:
    values = [round(value, 4) for value in values]
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for size in RANKS:
        rounds = [meet(size) for _ in range(ROUNDS)]
        found[str(size)] = {
            "seconds_to_meet": spread([seconds for seconds, _ in rounds]),
            "seconds_of_a_barrier": spread([barrier for _, barrier in rounds]),
        }
        print(size, found[str(size)], flush=True)
    result = {"imports": imported(), "meetings": found, **describe_environment(1, "cpu")}
    print(result["imports"])
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
