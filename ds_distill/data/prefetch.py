"""Prepare batches in a thread while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

from ds_distill.process.activity import mark
from ds_distill.types import Batch

Item = TypeVar("Item")
Made = TypeVar("Made")


def pinned_for(device: torch.device, batch: Batch) -> Batch:
    """A batch whose copy to a device does not wait for what that has still to do."""
    return batch.pin_memory() if device.type == "cuda" else batch


def prefetch(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Yield make(item) for each item in order, computed in a thread one item ahead: each is taken
    of `items`, by the caller's thread, before the one before it is yielded.

    An error of `make` is raised when its item is reached. A rank that others wait for is in one of
    two places of this loop, which its progress shows.
    """
    number, of = 1, f" of {len(items)}" if isinstance(items, Sized) else ""
    left = iter(items)
    with ThreadPoolExecutor(1) as thread:
        futures = deque(thread.submit(make, item) for item in islice(left, 1))
        while futures:
            mark(f"prepares batch {number}{of}", everywhere=True)
            made = futures.popleft().result()
            futures.extend(thread.submit(make, item) for item in islice(left, 1))
            mark(f"computes batch {number}{of}", everywhere=True)
            yield made
            number += 1
