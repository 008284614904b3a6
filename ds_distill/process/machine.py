"""The machine that this process runs on."""

from __future__ import annotations

import os
from itertools import takewhile


def machine_memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none on a machine without, or for CPU ranks."""
    if (named := named_gpus()) is not None:
        return named
    import torch  # seconds

    return [str(number) for number in range(torch.cuda.device_count())]


def named_gpus() -> list[str] | None:
    """The GPUs that the environment lets this process see, as CUDA names them; none where ranks are
    to run on CPUs, None where it says nothing."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    # CUDA takes those before the first that it does not know: -1 hides all.
    return list(takewhile(lambda one: one and one[0] != "-", map(str.strip, named.split(","))))
