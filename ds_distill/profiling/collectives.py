"""Torch's collectives as a part of what is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed

from ds_distill.process.timers import timed

COMMUNICATION = "communication"
_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class _Handle:
    """Of a collective that was begun: waiting for it is communication, too."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *arguments: Any, **options: Any) -> Any:
        with timed(COMMUNICATION):
            return self._work.wait(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def timed_collectives() -> Iterator[None]:
    """Inside this block the collectives of torch.distributed are the part COMMUNICATION: calling
    them, and waiting for those that run beside other work.

    DeepSpeed looks some of them up when it starts, so the block has to begin before that.
    """
    before = {name: getattr(torch.distributed, name) for name in _NAMES}
    for name, collective in before.items():
        setattr(torch.distributed, name, _timed(collective))
    try:
        yield
    finally:
        for name, collective in before.items():
            setattr(torch.distributed, name, collective)


def _timed(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any, **options: Any) -> Any:
        with timed(COMMUNICATION):
            work = collective(*arguments, **options)
        return None if work is None else _Handle(work)

    return call
