"""Prepare batches in a thread while the device computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ds_distill.process.activity import mark

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetch(make: Callable[[Item], Made], items: Sequence[Item]) -> Iterator[Made]:
    """Yield make(item) for each item in order, computed in a thread one item ahead.

    An error of `make` is raised when its item is reached. A rank that others wait for is in one of
    two places of this loop, which its progress shows.
    """
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(make, items[0]) if items else None
        for number in range(len(items)):
            assert future is not None
            mark(f"prepares batch {number + 1} of {len(items)}", everywhere=True)
            made = future.result()
            if number + 1 < len(items):
                future = thread.submit(make, items[number + 1])
            mark(f"computes batch {number + 1} of {len(items)}", everywhere=True)
            yield made
