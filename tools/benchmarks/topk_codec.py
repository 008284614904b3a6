"""What `compact` was chosen against: the K likeliest entries of each row, fixed width, fast to
decode.

    bytes 0-3    float32 log of the tail's mass
    bytes 4-7    float32 step
    from byte 8  K values of 8 bits: entry k is `value * step` nats below the first entry,
                 255 where it is absent
    then         K ids of ceil(log2 V) bits
    then         zeros up to a multiple of 4 bytes

Bit i of a row is bit i % 8, from the lowest, of its byte i // 8. Entries are in descending order.
The first one's value is not stored: the entries and the tail add up to 1.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_distill.cache.codecs.base import (
    Constants,
    Encoded,
    TopK,
    VocabularyCodec,
    entry_log_probs,
    top_of,
)
from ds_distill.cache.codecs.tail import TailShape

_HEADER = 8
_ABSENT = 255
_DEEPEST = 25.0
"""Nats below the likeliest entry. Rarer entries count as tail, so that one impossible entry does
not make the steps of all others coarse."""
_DECODED_ROWS = 1024
"""Rows decoded at once, so that they stay in the CPU's cache."""


LONGEST_FIELD = 31
"""In bits: a field fits an int32 without its sign, and spans at most two int32."""


def field_words(start: int, count: int, width: int) -> int:
    """Number of int32 in a row that ends with `count` fields of `width` bits from bit `start`."""
    return -(-(start + count * width) // 32)


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


class TopKCodec(VocabularyCodec):
    """Stores K entries and the tail's mass; `log_probs` spreads the tail evenly."""

    name: ClassVar[str] = "topk"

    def __init__(self, vocabulary: int, entries: int = 64) -> None:
        """entries: K, at most the vocabulary."""
        super().__init__(vocabulary)
        if entries < 1:
            raise ValueError(f"entries is {entries}: at least 1 is needed")
        self.entries = min(entries, vocabulary)
        bits = (vocabulary - 1).bit_length()
        start = 8 * (_HEADER + self.entries)
        self._ids = Fields(start, self.entries, bits)
        self._width = 4 * field_words(start, self.entries, bits)

    @property
    def width(self) -> int:
        return self._width

    def to_json(self) -> dict[str, Any]:
        return {"codec": self.name, "vocabulary": self.vocabulary, "entries": self.entries}

    def _encode(self, logits: Tensor, lse: Tensor) -> Encoded:
        log_probs, ids, tail = top_of(logits, lse, self.entries)
        below = log_probs[:, :1] - log_probs
        absent = ~(below <= _DEEPEST)
        left_out = log_probs.masked_fill(~absent, -math.inf)
        tail = torch.logsumexp(torch.cat((left_out, tail[:, None]), 1), 1)
        below = below.masked_fill(absent, 0.0)
        step = below.amax(1, keepdim=True) / (_ABSENT - 1)
        values = (below / step.clamp(min=1e-30)).round_().clamp_(max=_ABSENT - 1)
        values.masked_fill_(absent, _ABSENT)

        payload = torch.zeros(len(ids), self.width, dtype=torch.uint8, device=ids.device)
        payload.view(torch.float32)[:, 0] = tail
        payload.view(torch.float32)[:, 1] = step[:, 0]
        payload[:, _HEADER : _HEADER + self.entries] = values.to(torch.uint8)
        self._ids.write(payload.view(torch.int32), ids.masked_fill(absent, 0))
        return Encoded(payload)

    def decode(self, encoded: Encoded) -> TopK:
        """The likeliest entries and the mass of all others."""
        payload = encoded.payload
        if payload.dtype != torch.uint8 or payload.ndim != 2 or payload.shape[1] != self.width:
            raise ValueError(
                f"payload is {payload.dtype} {tuple(payload.shape)}: uint8 [rows, {self.width}] is "
                "needed"
            )
        shape, device = (len(payload), self.entries), payload.device
        log_probs = torch.empty(shape, dtype=torch.float32, device=device)
        ids = torch.empty(shape, dtype=torch.int64, device=device)
        tail = torch.empty(len(payload), dtype=torch.float32, device=device)
        step = _DECODED_ROWS if device.type == "cpu" else max(1, len(payload))
        for start in range(0, len(payload), step):
            rows = slice(start, start + step)
            self._decode(payload[rows].contiguous(), log_probs[rows], ids[rows], tail[rows])
        return TopK(log_probs, ids, tail)

    def _decode(self, payload: Tensor, log_probs: Tensor, ids: Tensor, tail: Tensor) -> None:
        header = payload.view(torch.float32)
        # NaN, from damaged bytes, would pass through clamp.
        torch.clamp(header[:, 0].nan_to_num(nan=0.0, neginf=-math.inf), max=0.0, out=tail)
        values = payload[:, _HEADER : _HEADER + self.entries]
        absent = values == _ABSENT
        torch.mul(values, -header[:, 1:2], out=log_probs)
        entry_log_probs(log_probs.masked_fill_(absent, -math.inf), tail)
        found = self._ids.read(payload.view(torch.int32))
        found.clamp_(max=self.vocabulary - 1).masked_fill_(absent, -1)
        ids.copy_(found)

    def log_probs(self, encoded: Encoded) -> Tensor:
        return TailShape.even(self.vocabulary).spread(self.decode(encoded))
