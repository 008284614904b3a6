"""The most memory that was in use since the last time that one asked."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def allocated_peak() -> int:
    """Bytes of torch's allocator on the GPU."""
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def resident_peak() -> int | None:
    """Bytes of this process, code and data included; None where the system does not tell. It takes
    milliseconds."""
    try:
        lines = _STATUS.read_text().splitlines()
        _CLEAR.write_text("5")  # Linux: begin anew with the peak
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if kib is None else int(kib) * 1024
