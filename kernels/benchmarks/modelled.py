"""The least time of an op both ways on a GPU that need not be there, from what the compiler made.

Of each pass over the data, the longest of three: what is issued, the exponentials, the bytes. Full
rates: a real kernel reaches a part of them. Products of matrices are taken to hide behind these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPILED = Path(__file__).parent / "results" / "compiled.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """Rates of one second, from the makers' data sheets; copied: 0.87 of the memory's peak, bytes;
    issued, special: instructions and exponentials of a thread."""

    name: str
    target: str
    multiprocessors: int
    issued: float
    special: float
    copied: float
    cache: int  # bytes that stay until a second loop


def _machine(
    name: str, target: str, processors: int, gigahertz: float, memory: float, cache: int
) -> Machine:
    # 128 threads of a multiprocessor a cycle; of AMD's four units of 16, 64.
    threads = 64 if target.startswith("gfx") else 128
    rate = processors * gigahertz * 1e9
    return Machine(
        name, target, processors, threads * rate, 16 * rate, 0.87e12 * memory, cache << 20
    )


MACHINES = [
    _machine("A100", "sm_80", 108, 1.41, 2.04, 40),
    _machine("H100", "sm_90", 132, 1.98, 3.35, 50),
    _machine("H200", "sm_90", 132, 1.98, 4.8, 50),
    _machine("B200", "sm_100", 148, 1.96, 8.0, 126),
    _machine("MI300X", "gfx942", 304, 2.1, 5.3, 256),
]


@dataclass(frozen=True)
class Pass:
    """Once over the data: so many elements and bytes; instructions and exponentials of each."""

    elements: float
    instructions: float
    special: float
    moved: float


def _loops(row: Row) -> list[tuple[float, float]]:
    """(instructions, exponentials) per element of the loops that read or multiply, and of the
    zeros alone none."""
    both = zip(row["each"], row["loops"], strict=True)
    return [
        (each, each * loop["special"] / loop["instructions"])
        for each, loop in both
        if loop["special"]
    ]


def _rows_of_logits(rows: list[Row], shape: dict[str, int], machine: Machine) -> list[Pass]:
    counted, width, size = shape["counted"], shape["V"], shape["size"]
    pairs, others = counted * width, (shape["N"] - counted) * width
    by_kernel = {row["kernel"]: _loops(row) for row in rows}
    if "tail_backward_kernel" in by_kernel:
        first, last = by_kernel["forward_kernel"][0], by_kernel["tail_backward_kernel"][0]
        return [
            Pass(pairs, *first, size * pairs),
            Pass(pairs, *last, size * (2 * pairs + others)),
        ]
    forward = next(row for row in rows if row["kernel"] == "forward_kernel")
    threads = forward["loops"][0]["threads"]
    programs = machine.multiprocessors * max(1, round(forward["occupancy"] * 2048 / threads))
    hits = 2 * size * width * min(programs, counted) <= machine.cache
    first, second, last = *by_kernel["forward_kernel"], by_kernel["backward_kernel"][0]
    return [
        Pass(pairs, *first, 2 * size * pairs),
        Pass(pairs, *second, 0 if hits else 2 * size * pairs),
        Pass(pairs, *last, size * (3 * pairs + others)),
    ]


def _scores(rows: list[Row], shape: dict[str, int], machine: Machine) -> list[Pass]:
    """Each loop over the scores of all tiles up to the last real token."""
    states = shape["B"] * shape["A"] * shape["S"] * shape["D"] * shape["size"]
    tensors = 2 if rows[0]["op"] == "attention_kl" else 1
    return [
        Pass(shape["scores"], *loop, states * 2 * tensors) for row in rows for loop in _loops(row)
    ]


def seconds(rows: list[Row], shape: dict[str, int], machine: Machine) -> float:
    """rows: an op's launches of one dtype, as `compiled.py` writes them. shape: its sizes, with
    `size` (bytes of an element) and `counted` rows or visited `scores`."""
    of = _scores if "heads" in rows[0]["shape"] else _rows_of_logits
    return sum(
        max(
            one.elements * one.instructions / machine.issued,
            one.elements * one.special / machine.special,
            one.moved / machine.copied,
        )
        for one in of(rows, shape, machine)
    )


def least_bytes(counted: int, others: int, width: int, size: int) -> int:
    """Of `masked_kl` both ways: logits read once each way, a gradient written."""
    return 5 * size * counted * width + size * others * width


def machine_of(device: str) -> Machine | None:
    """By what the driver calls a device."""
    return next((machine for machine in MACHINES if machine.name in device), None)


def launches_of(target: str, op: str, width: int, dtype: str) -> list[Row]:
    """From the committed results; none where it was not compiled."""
    rows = json.loads(COMPILED.read_text())["rows"] if COMPILED.is_file() else []
    shapes = (f"V={width}", f"V={width} K=64", "S=512 heads of 64")
    found = [
        row
        for row in rows
        if (row["target"], row["op"], row["dtype"]) == (target, op, dtype)
        and row["shape"] in shapes
    ]
    return found if found and all("loops" in row for row in found) else []
