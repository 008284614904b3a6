"""The `compact` codec: a variable number of entries per row, in few bytes.

A row stores its k entries of at least `threshold`, sorted by id:

    byte 0      k, from 1 to 255
    byte 1      step, in 1/128 nat
    bytes 2-3   float16 log of the tail's mass
    D bytes     int8, the row's coordinates along the directions of the tail's shape
    then bits   k values of 4 bits: an entry is `value * step` nats below the likeliest
                k times the lowest l bits of the id, l = floor(log2(V / k))
                k + ((V - 1) >> l) bits: bit (id >> l) + j is set for the j-th entry
    then        zeros up to a whole byte

The ids are coded as Elias and Fano did sorted sets (Vigna 2013, "Quasi-succinct indices"):
at most 2 + log2(V / k) bits per entry, against log2(V). A row's length follows from its k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_distill.cache.codecs.base import (
    Constants,
    Encoded,
    TopK,
    VocabularyCodec,
    entry_log_probs,
    read_at,
    top_of,
    write_at,
)
from ds_distill.cache.codecs.tail import TailShape

_FIXED = 4
_MOST = 255
_VALUE_BITS = 4
_STEPS = 128.0
_LEAST_TAIL = -(2.0**-24)
"""The float16 next to 0: a tail of exactly 1 would leave no mass for the entries."""


@dataclass(frozen=True)
class _Layout:
    """Bit positions of the fields of n rows, N = sum of k: all int64."""

    k: Tensor  # [n]
    first_bit: Tensor  # [n]: of each row's values
    row: Tensor  # [N]: the row of each entry
    rank: Tensor  # [N]: j, the entry's rank in its row
    low_bits: Tensor  # [n]: l

    @property
    def values(self) -> Tensor:
        """Position of each entry's value: [N]."""
        return self.first_bit[self.row] + _VALUE_BITS * self.rank

    @property
    def lows(self) -> Tensor:
        """Position of the low part of each entry's id: [N]."""
        start = self.first_bit + _VALUE_BITS * self.k
        return start[self.row] + self.low_bits[self.row] * self.rank

    @property
    def highs(self) -> Tensor:
        """Position of each row's high part: [n]."""
        return self.first_bit + (_VALUE_BITS + self.low_bits) * self.k


class CompactCodec(VocabularyCodec):
    """Stores entries above a threshold; spreads the tail by the teacher's own prior."""

    name: ClassVar[str] = "compact"
    fitted_keys: ClassVar[tuple[str, ...]] = ("tail",)

    def __init__(
        self, vocabulary: int, threshold: float = 1e-3, tail: TailShape | None = None
    ) -> None:
        """
        threshold: entries of at least this probability are stored; always the likeliest one,
            and 255 at most.
        tail: fitted to the teacher; None spreads the tail evenly.
        """
        super().__init__(vocabulary)
        if not 1e-9 <= threshold < 1:
            raise ValueError(f"threshold is {threshold}: a probability from 1e-9 is needed")
        if vocabulary > 1 << 24:
            raise ValueError(f"vocabulary is {vocabulary}: at most 2^24 entries are possible")
        self.threshold = threshold
        self.tail = tail or TailShape.even(vocabulary)
        self._is_even = tail is None
        if len(self.tail.codes) != vocabulary:
            raise ValueError(
                f"the tail's shape has {len(self.tail.codes)} entries and the vocabulary "
                f"{vocabulary}: fit it to this teacher"
            )
        self._header = _FIXED + self.tail.num_directions
        self._most = min(_MOST, vocabulary)
        counts = range(1, self._most + 1)
        # Index 0 is unused: k is at least 1.
        low_bits = torch.tensor([0, *((vocabulary // k).bit_length() - 1 for k in counts)])
        k = torch.arange(self._most + 1)
        high_bits = k + ((vocabulary - 1) >> low_bits)
        lengths = self._header + (k * (_VALUE_BITS + low_bits) + high_bits + 7) // 8
        self._constants = Constants(low_bits, high_bits, lengths)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CompactCodec:
        given = dict(values)
        tail = given.pop("tail")
        return cls(**given, tail=None if tail is None else TailShape.from_json(tail))

    def fit(self, batches: Iterable[Tensor]) -> CompactCodec:
        tail = TailShape.fit(batches, self.threshold)
        return CompactCodec(self.vocabulary, self.threshold, tail)

    @property
    def width(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "codec": self.name,
            "vocabulary": self.vocabulary,
            "threshold": self.threshold,
            "tail": None if self._is_even else self.tail.to_json(),
        }

    def _encode(self, logits: Tensor, lse: Tensor) -> Encoded:
        coordinates = self.tail.coordinates(logits - lse, self.threshold)
        log_probs, ids, rest = top_of(logits, lse, self._most)
        stored = log_probs >= math.log(self.threshold)
        stored[:, 0].fill_(True)
        left_out = torch.cat((log_probs.masked_fill(stored, -math.inf), rest[:, None]), 1)
        tail = torch.logsumexp(left_out, 1).clamp(max=_LEAST_TAIL).half()

        below = (log_probs[:, :1] - log_probs).masked_fill(~stored, 0.0)
        step = (below.amax(1) * _STEPS / (2**_VALUE_BITS - 1)).ceil().clamp(1, 255)
        values = (below * (_STEPS / step)[:, None]).round().clamp(max=2**_VALUE_BITS - 1).long()
        ids, order = ids.masked_fill(~stored, self.vocabulary).sort(1)
        values = values.gather(1, order)

        k = stored.sum(1)
        lengths = self._constants.on(k.device)[2][k]
        ends = lengths.cumsum(0)
        entries, size = torch.stack((k.sum(), lengths.sum())).tolist()  # the one wait for a GPU
        at = self._layout(k, ends - lengths, entries)
        # One byte per int32, so that fields that share a byte can be added.
        data = torch.zeros(size, dtype=torch.int32, device=k.device)
        header = torch.stack((k, step.long()), 1)
        numbers = (tail[:, None].view(torch.uint8), coordinates.view(torch.uint8))
        header = torch.cat((header, *(part.long() for part in numbers)), 1)
        start = (ends - lengths)[:, None] + torch.arange(self._header, device=k.device)
        data[start] = header.int()
        flat_ids, low_bits = ids[at.row, at.rank], at.low_bits[at.row]
        write_at(data, at.values, values[at.row, at.rank])
        write_at(data, at.lows, flat_ids & ((1 << low_bits) - 1))
        high = at.highs[at.row] + (flat_ids >> low_bits) + at.rank
        write_at(data, high, torch.ones_like(high))
        return Encoded(data.to(torch.uint8), lengths)

    def decode(self, encoded: Encoded) -> TopK:
        """The stored entries and the mass of all others, which add up to 1."""
        encoded = self.counted(encoded)
        assert encoded.counts is not None
        most, entries, bits = encoded.counts
        payload, k, starts = self._rows(encoded)
        at = self._layout(k, starts, entries)
        shape = (len(k), most)
        step = payload[starts + 1] / -_STEPS
        tail = _halves(payload, starts + 2).clamp(max=_LEAST_TAIL)
        below = torch.full(shape, -math.inf, device=payload.device)
        values = read_at(payload, at.values, _VALUE_BITS)
        below[at.row, at.rank] = values * step[at.row]

        low_bits = at.low_bits[at.row]
        offset, is_set = self._highs(payload, at, bits)
        # The place of the j-th bit that is set, without a wait for how many there are.
        places = torch.searchsorted(is_set.cumsum(0), torch.arange(1, entries + 1, device=k.device))
        high = offset[places] - at.rank
        found = (high << low_bits) | read_at(payload, at.lows, low_bits)
        ids = torch.full(shape, -1, dtype=torch.int64, device=payload.device)
        ids[at.row, at.rank] = found
        return TopK(entry_log_probs(below, tail), ids, tail)

    def log_probs(self, encoded: Encoded) -> Tensor:
        encoded = self.counted(encoded)
        payload, _, starts = self._rows(encoded)
        at = torch.arange(_FIXED, self._header, device=payload.device)
        coordinates = payload[starts[:, None] + at].view(torch.int8)
        return self.tail.spread(self.decode(encoded), coordinates)

    def _rows(self, encoded: Encoded) -> tuple[Tensor, Tensor, Tensor]:
        """Payload, k [n] and first byte [n] of each row."""
        payload, lengths = encoded.payload, encoded.lengths
        assert lengths is not None
        starts = lengths.cumsum(0) - lengths
        return payload, payload[starts].long(), starts

    def counted(self, encoded: Encoded) -> Encoded:
        """Counts the entries of the row that has most, those of all rows, and the bits of their
        high parts."""
        if encoded.counts is not None:
            return encoded
        _, k, _ = self._rows(encoded)
        bits = int(self._constants.on(k.device)[1][k].sum())
        return replace(encoded, counts=(int(k.max()) if len(k) else 1, int(k.sum()), bits))

    def _layout(self, k: Tensor, starts: Tensor, entries: int) -> _Layout:
        """entries: N."""
        row, rank = _repeated(k, entries)
        low_bits, _, _ = self._constants.on(k.device)
        return _Layout(k, 8 * (starts + self._header), row, rank, low_bits[k])

    def _highs(self, payload: Tensor, at: _Layout, bits: int) -> tuple[Tensor, Tensor]:
        """Of all bits of high parts the place in its row, int64, and the bit, uint8: [bits]."""
        _, high_bits, _ = self._constants.on(at.k.device)
        row, offset = _repeated(high_bits[at.k], bits)
        position = at.highs[row] + offset
        return offset, (payload[position >> 3] >> (position & 7).to(torch.uint8)) & 1


def _repeated(sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of the items of n rows the row, and the place in it: int64 [n] -> int64 [total] each."""
    row = torch.repeat_interleave(sizes, output_size=total)
    return row, torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]


def _halves(payload: Tensor, byte: Tensor) -> Tensor:
    """float16 numbers at bytes [n] -> float32 [n]."""
    pair = torch.stack((payload[byte], payload[byte + 1]), 1)
    return pair.view(torch.float16).squeeze(1).float()
