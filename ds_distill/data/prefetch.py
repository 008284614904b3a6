"""Work that is done while the device does other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetch(make: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Made]:
    """make(item) of each item in order, by a thread that is one item ahead of who takes them.

    An error that `make` raises is raised where its item is taken.
    """
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(make, items[0]) if items else None
        for number in range(len(items)):
            assert coming is not None
            made = coming.result()
            if number + 1 < len(items):
                coming = thread.submit(make, items[number + 1])
            yield made
