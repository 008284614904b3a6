"""The base class of codecs for distributions over a vocabulary, and what codecs share: bit fields
in rows of bytes, read and written for whole tensors at once.

Bit i of a row is bit i % 8, from the lowest, of its byte i // 8. A field's lowest bit comes first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ds_distill.recipe.codecs import CodecSettings

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Float32 elements of logits that are processed at once, 64 or 256 MiB a copy: a GPU would wait for
Python to begin with each."""


@dataclass(slots=True)
class Encoded:
    """n encoded rows, on any device."""

    payload: Tensor
    """uint8 [n, W] of a codec with a fixed width, else uint8 [bytes]: the rows end to end."""
    lengths: Tensor | None = None
    """int64 [n]: bytes of each row; None with a fixed width."""
    counts: tuple[int, ...] | None = None
    """What `VocabularyCodec.counted` counted."""

    def __len__(self) -> int:
        return len(self.payload if self.lengths is None else self.lengths)

    @property
    def num_bytes(self) -> int:
        return self.payload.numel()

    def to(self, device: torch.device) -> Encoded:
        lengths = None if self.lengths is None else self.lengths.to(device, non_blocking=True)
        return Encoded(self.payload.to(device, non_blocking=True), lengths, self.counts)

    def pin_memory(self) -> Encoded:
        lengths = None if self.lengths is None else self.lengths.pin_memory()
        return Encoded(self.payload.pin_memory(), lengths, self.counts)


@dataclass(frozen=True)
class TopK:
    """Distributions over a vocabulary as their likeliest entries and the mass of the tail."""

    log_probs: Tensor
    """float32 [n, K]: of softmax(logits / T), at the T of the cache; -inf where `ids` has -1."""
    ids: Tensor
    """int64 [n, K]; -1 where a row has fewer than K entries."""
    tail_log_prob: Tensor
    """float32 [n]: the mass of all other entries together."""


class VocabularyCodec(ABC):
    """Encodes distributions over V entries as bytes. Rows are independent; the work is batched.

    A codec is its JSON: `codec_from_json(codec.to_json())` decodes what `codec` encoded. Equal
    logits on the same device give equal bytes, whatever their batch. Bytes are as a codec wrote
    them: a cache's blocks have checksums.
    """

    name: ClassVar[str]
    """The name in recipes and manifests."""
    fitted_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of its JSON that `fit` finds; none: it is not fitted."""

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < 2:
            raise ValueError(f"vocabulary is {vocabulary}: at least 2 entries are needed")
        self.vocabulary = vocabulary

    @classmethod
    def of(cls, settings: CodecSettings, vocabulary: int) -> Self:
        """The codec of a recipe's section, not fitted: the section's own keys are the constructor's
        arguments."""
        return cls(vocabulary, **settings.model_dump(exclude={"name", "temperature"}))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """From `to_json` without the key `codec`. Raises KeyError, TypeError or ValueError."""
        return cls(**values)

    def fit(self, batches: Iterable[Tensor]) -> VocabularyCodec:
        """This codec with its `fitted_keys`, from a teacher's logits: float32 [n, V] each, at the
        cache's temperature."""
        raise NotImplementedError(f"codec {self.name} is not fitted")

    @property
    @abstractmethod
    def width(self) -> int | None:
        """Bytes of a row; None when rows differ in length."""

    def counted(self, encoded: Encoded) -> Encoded:
        """The same rows, with what decoding would else count of them: on the CPU, so that decoding
        on a GPU waits for nothing."""
        return encoded

    @abstractmethod
    def log_probs(self, encoded: Encoded) -> Tensor:
        """The full distributions, on the device of `encoded`: float32 [n, V]."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All that decoding needs, as JSON values; `codec` is the name."""

    @abstractmethod
    def _encode(self, logits: Tensor, lse: Tensor) -> Encoded:
        """`encode` for some rows. logits: float32 [m, V], contiguous, may be overwritten; lse: its
        log-sum-exp [m, 1]."""

    def encode(self, logits: Tensor, *, finite: bool = False) -> Encoded:
        """Encode logits on their own device.

        logits: float [n, V], any strides, already divided by the temperature of the cache; -inf
            for an impossible entry.
        finite: all are known to be, so that nothing waits for the device to look.

        Raises ValueError for another width than V, and when a row is no distribution (NaN,
        +inf, or nothing but -inf).
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocabulary:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} for a vocabulary of {self.vocabulary}: "
                "[rows, vocabulary] is needed"
            )
        parts = []
        for start, chunk in self._chunks(logits):
            own = torch.empty(chunk.shape, dtype=torch.float32, device=chunk.device).copy_(chunk)
            lse = torch.logsumexp(own, 1, keepdim=True)
            if not finite and len(broken := (~lse.isfinite()).squeeze(1).nonzero().squeeze(1)):
                raise ValueError(
                    f"{len(broken)} rows of logits are no distribution (NaN, +inf or all -inf), "
                    f"first row {start + int(broken[0])}"
                )
            parts.append(self._encode(own, lse))
        lengths = [part.lengths for part in parts if part.lengths is not None]
        return Encoded(
            torch.cat([part.payload for part in parts]), torch.cat(lengths) if lengths else None
        )

    def _chunks(self, logits: Tensor) -> Iterator[tuple[int, Tensor]]:
        elements = _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS["cpu"])
        rows = max(1, elements // self.vocabulary)
        for start in range(0, max(1, len(logits)), rows):  # no rows: one chunk of none
            yield start, logits[start : start + rows]


@dataclass(frozen=True)
class StoredLogits:
    """Encoded distributions, decoded on the device where they are needed."""

    encoded: Encoded
    codec: VocabularyCodec
    temperature: float
    """The temperature of the stored distributions."""

    def __len__(self) -> int:
        return len(self.encoded)

    def to(self, device: torch.device) -> Tensor:
        """Logits [n, V], whose softmax at `temperature` is the stored distribution."""
        return self.temperature * self.codec.log_probs(self.moved(device).encoded)

    def moved(self, device: torch.device) -> StoredLogits:
        return replace(self, encoded=self.codec.counted(self.encoded).to(device))

    def pin_memory(self) -> StoredLogits:
        return replace(self, encoded=self.codec.counted(self.encoded).pin_memory())


@dataclass(frozen=True)
class StoredNumbers:
    """Logits without a codec, float32 on the device where they are needed."""

    numbers: Tensor
    """float16, bfloat16 or float32 [n, C]."""

    def __len__(self) -> int:
        return len(self.numbers)

    def to(self, device: torch.device) -> Tensor:
        """float32 [n, C]."""
        return self.numbers.to(device, non_blocking=True).float()

    def moved(self, device: torch.device) -> StoredNumbers:
        """These stay where they are until `to`: over a vocabulary a step's are as large as its
        logits, and from pinned memory `to` does not wait."""
        return self

    def pin_memory(self) -> StoredNumbers:
        return StoredNumbers(self.numbers.pin_memory())


def top_of(logits: Tensor, lse: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest entries of each row: log-probs [n, K] falling, ids [n, K], and the log of
    the mass of all others [n]. Overwrites `logits`."""
    values, ids = torch.topk(logits, entries, dim=1)
    logits.scatter_(1, ids, -math.inf)
    log_probs = values - lse
    return log_probs, ids, _complement(log_probs, torch.logsumexp(logits, 1) - lse.squeeze(1))


def _complement(entries: Tensor, rest: Tensor) -> Tensor:
    """The log mass of the rest. Of two masses that add up to 1 the smaller is the more exact, so a
    large rest is computed from the entries. A small rest as 1 - sum would be all rounding."""
    head = torch.logsumexp(entries, 1)
    return torch.where(rest < head, rest, torch.log1p(-torch.exp(head.clamp(max=-0.5)))).clamp(
        max=0.0
    )


def entry_log_probs(below_first: Tensor, tail: Tensor) -> Tensor:
    """Scale entries so that they and the tail add up to 1; the first one's value is not stored.

    below_first: [n, K], log-probs minus the first entry's, so at most 0; -inf where absent;
    overwritten. tail: [n]. Returns log-probs [n, K].
    """
    mass = torch.log(-torch.expm1(tail))
    return below_first.add_((mass - below_first.exp().sum(1).log())[:, None])


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
