"""Bit fields in rows of bytes, read and written for whole tensors at once.

Bit i of a row is bit i % 8, from the lowest, of its byte i // 8. A field's lowest bit comes
first.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Constants:
    """Constant tensors, copied to each device once: a copy from memory that is not pinned waits for
    the device."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._on:  # of two threads each may copy, and one's copies are kept
            self._on[device] = tuple(tensor.to(device) for tensor in self._tensors)
        return self._on[device]


def read_at(data: Tensor, position: Tensor, width: Tensor | int) -> Tensor:
    """Read fields of up to 24 bits at any bit positions: uint8 [bytes], int64 [m] -> int64 [m].

    Every position must lie in `data`; bits beyond its end are 0.
    """
    byte, shift = position >> 3, position & 7
    padded = torch.nn.functional.pad(data, (0, 4))
    value = padded[byte].long()
    for step in range(1, 4):
        value |= padded[byte + step].long() << (8 * step)
    return (value >> shift) & ((1 << width) - 1)


def write_at(data: Tensor, position: Tensor, value: Tensor) -> None:
    """Write fields of up to 24 bits that are still 0. data: int32 [bytes], a byte in each;
    position, value: int64 [m]. Fields share no bit, so adding is the same as setting."""
    byte, shifted = position >> 3, value << (position & 7)
    for step in range(4):
        part = (shifted >> (8 * step)) & 255
        data.index_add_(0, (byte + step).clamp(max=len(data) - 1), part.int())
