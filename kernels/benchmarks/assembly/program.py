"""A compiled program and its loops, of any maker of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """A loop that reads or writes memory or multiplies matrices; of a program without any, all of
    it.

    instructions: of one thread in one turn; threads: of a program.
    loads, stores: bytes of an access to global memory -> how many of them.
    """

    instructions: int
    threads: int
    loads: dict[int, int]
    stores: dict[int, int]
    special: int  # exponentials, logarithms, roots
    shuffles: int
    barriers: int
    matrix: str  # the matrix instruction, or ""
    whole: bool  # the program has no loop

    def each(self, elements: float) -> float:
        """Instructions per element, of which a program takes so many in one turn."""
        return self.instructions * self.threads / elements


@dataclass(frozen=True)
class Compiled:
    """A launch as the compiler made it. spilled, shared: bytes of a thread, of a program.
    occupancy: warps that fit, of those that a multiprocessor can hold."""

    registers: int
    spilled: int
    shared: int
    occupancy: float
    loops: list[Loop]


def counted(
    bodies: list[Counter[str]], everything: Counter[str], counts: Callable[[str], bool]
) -> Iterator[tuple[Counter[str], bool]]:
    """The opcodes of each loop that has one which `counts`; of a program without such a loop of
    all of it, and True."""
    found = [body for body in bodies if any(map(counts, body))]
    yield from ((body, False) for body in found)
    if not found:
        yield everything, True
