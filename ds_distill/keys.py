"""Content keys of examples, and random numbers as functions of them.

A key is the xxh3-128 of the raw text fields: the same example has the same key in every
file, order, process and machine. Every random choice about an example is a hash of (seed,
epoch, purpose, key), not a number from a generator, so that it does not depend on rank,
worker or order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import xxhash

if TYPE_CHECKING:
    import torch

Integers = TypeVar("Integers", "torch.Tensor", np.ndarray)
"""int64 arrays of torch or numpy, whose products wrap around on overflow."""

_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64  # splitmix64's constants, as signed 64-bit integers
_MIX_2 = 0x94D049BB133111EB - 2**64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def content_keys(texts: list[str], texts_b: list[str] | None = None) -> np.ndarray:
    """Keys of examples given their raw text fields: int64 [N, 2].

    A pair's fields are joined by a zero byte after the first field's length, so that
    ("ab", "c") and ("a", "bc") differ.
    """
    fields = (text.encode("utf-8", "surrogatepass") for text in texts)
    if texts_b is not None:
        seconds = (text.encode("utf-8", "surrogatepass") for text in texts_b)
        pairs = zip(fields, seconds, strict=True)
        fields = (len(raw).to_bytes(8, "big") + raw + b"\0" + second for raw, second in pairs)
    return _keys_of(map(xxhash.xxh3_128_digest, fields))


def token_keys(examples: Iterable[np.ndarray]) -> np.ndarray:
    """Keys of examples of which only the token ids are known, int64 [length] each: int64 [N, 2].
    They differ from the `content_keys` of the texts."""
    return _keys_of(xxhash.xxh3_128_digest(np.ascontiguousarray(ids).tobytes()) for ids in examples)


def name_id(name: str) -> int:
    """A positive 63-bit number that stands for a name: it does not depend on what others there
    are."""
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1 or 1


def _keys_of(digests: Iterable[bytes]) -> np.ndarray:
    keys = np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, 2)
    return keys.astype(np.uint64).view(np.int64)


def hash_keys(keys: Integers, *stream: int | Integers) -> Integers:
    """Mix keys with integers (seed, epoch, purpose, position...) to uniform 64-bit hashes.

    keys: int64 [..., 2], a tensor on any device, or a numpy array of at least two dimensions.
    stream: integers, or int64 arrays that broadcast against [...].
    Returns int64 [...]. Splitmix64's finaliser, once per integer; the same on every device.
    """
    state = _mix(keys[..., 0]) ^ keys[..., 1]
    for part in stream:
        state = _mix(state + _GOLDEN) ^ part
    return _mix(_mix(state + _GOLDEN))


def sorted_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N, 2] -> positions in ascending order of the keys, of equal ones in their own order,
    int64 [N]; and which of these positions is the first of its key, bool [N]."""
    high, low = keys[:, 0], keys[:, 1]
    # Half a key tells nearly all apart, and is sorted in a fraction of the time.
    order = np.argsort(high, kind="stable")
    same = np.diff(high[order]) == 0
    if (same & (np.diff(low[order]) != 0)).any():
        order = np.lexsort((low, high))
        same = np.diff(high[order]) == 0
    first = np.ones(len(keys), dtype=bool)
    first[1:] = ~(same & (np.diff(low[order]) == 0))
    return order, first


def distinct_keys(keys: np.ndarray) -> np.ndarray:
    """The position of the first example with each key, in ascending order of the keys: int64
    [N, 2] -> int64 [M]."""
    order, first = sorted_keys(keys)
    return order[first]


def numbered_keys(keys: np.ndarray) -> np.ndarray:
    """The same number where the keys are the same, from 0 on in their order: int64 [N, 2] ->
    int64 [N]."""
    order, first = sorted_keys(keys)
    numbers = np.empty(len(keys), dtype=np.int64)
    numbers[order] = np.cumsum(first) - 1
    return numbers


def among_keys(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which keys, int64 [N, 2], are among others, int64 [M, 2]: bool [N]."""
    if not len(others):
        return np.zeros(len(keys), dtype=bool)
    numbers = numbered_keys(np.concatenate([others, keys]))
    there = np.zeros(len(numbers), dtype=bool)
    there[numbers[: len(others)]] = True
    return there[numbers[len(others) :]]


def find_keys(high: np.ndarray, low: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where keys, int64 [B, 2], stand among N distinct ones that are sorted, by their halves, int64
    [N]: int64 [B], -1 of one that is not there."""
    if len(keys) > _LARGE_LOOKUP:
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        positions = np.empty(len(keys), dtype=np.int64)
        positions[order] = _find_keys(high, low, keys[order])
        return positions
    return _find_keys(high, low, keys)


_LARGE_LOOKUP = 10_000
"""Number of keys from which sorting them first is faster: neighbours are then near in memory."""


def _find_keys(high: np.ndarray, low: np.ndarray, keys: np.ndarray) -> np.ndarray:
    position = np.searchsorted(high, keys[:, 0])
    last = len(high) - 1
    if last < 0:
        return np.full(len(keys), -1, dtype=np.int64)
    while True:  # continues only where two keys share their first 64 bits
        near = np.minimum(position, last)
        high_fits = (position <= last) & (high[near] == keys[:, 0])
        found = high_fits & (low[near] == keys[:, 1])
        advance = high_fits & ~found
        if not advance.any():
            break
        position = position + advance
    return np.where(found, near, -1)


def uniform(keys: torch.Tensor, *stream: int | torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1) from keys and a stream: float64 [...], exact on any device."""
    top_53_bits = (hash_keys(keys, *stream) >> 11) & (2**53 - 1)
    return top_53_bits.double() * 2.0**-53


def _mix(x: Integers) -> Integers:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Integers, bits: int) -> Integers:
    """Logical shift: `>>` is arithmetic and would copy the sign bit."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
