"""Bit fields in rows of bytes, read and written for whole tensors at once.

Bit i of a row is bit i % 8, from the lowest, of its byte i // 8. A field's lowest bit comes
first. Rows are given as int32 words, little-endian on every machine that torch supports.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST_FIELD = 31
"""In bits: a field fits an int32 without its sign, and spans at most two int32."""


def field_words(start: int, count: int, width: int) -> int:
    """Number of int32 in a row that ends with `count` fields of `width` bits from bit `start`."""
    return -(-(start + count * width) // 32)


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


class Fields:
    """`count` fields of `width` bits side by side, from bit `start` of every row."""

    def __init__(self, start: int, count: int, width: int) -> None:
        assert 0 < width <= LONGEST_FIELD
        position = start + width * torch.arange(count)
        word, shift = position >> 5, (position & 31).int()
        in_first = (32 - shift).clamp(max=width)
        first_mask = ((1 << in_first.long()) - 1).int()
        next_mask = (1 << width) - 1 - first_mask
        crossing = next_mask != 0
        next_word = torch.where(crossing, word + 1, word)
        next_shift = torch.where(crossing, 32 - shift, 0).int()
        self._to_read = Constants(word, shift, first_mask, next_word, next_shift, next_mask)
        self._to_write = Constants(word, shift, next_word, in_first)

    def read(self, words: Tensor) -> Tensor:
        """int32 [n, W] -> int32 [n, count]."""
        word, shift, mask, next_word, next_shift, next_mask = self._to_read.on(words.device)
        first = words.index_select(1, word)
        first >>= shift
        first &= mask
        rest = words.index_select(1, next_word)
        rest <<= next_shift
        rest &= next_mask
        return first.bitwise_or_(rest)

    def write(self, words: Tensor, values: Tensor) -> None:
        """Write fields that are still 0. words: int32 [n, W]; values: int [n, count]."""
        word, shift, next_word, in_first = self._to_write.on(words.device)
        values = values.int()
        # Fields share no bit, so adding is the same as setting. What is left of a value that does
        # not cross a word is 0.
        words.index_add_(1, word, values << shift)
        words.index_add_(1, next_word, values >> in_first)


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
