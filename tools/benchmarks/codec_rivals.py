"""Formats that the compact codec is compared with, transcribed from their descriptions.

DistillKit (arcee-ai/DistillKit: README, distillkit/compression/config.py and densify.py). A row
holds, one after the other,

    exact_k log-probs of the likeliest entries, in bfloat16
    float32 coefficients of a least-squares fit to the log-probs of the next k - exact_k
        entries, over their place t = 0, 1, ..., with the terms t^i and sqrt(t)
    k ids of ceil(log2 V) bits

without residual bins, delta encoding or error diffusion, as its README recommends. Nothing is
kept of the tail: its `symmetric_uniform` handling gives each of the V - k other entries
max((1 - sum) / (V - k), 1e-8), and renormalises. Its `zero` handling makes KL(true || decoded)
infinite. The fit is done here in float64, to its advantage.

Megatron-LM: float16 log-probs and ids, here of ceil(log2 V) bits; the tail's mass is kept here
in float16, and spread evenly, to its advantage.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from topk_codec import Fields, field_words
from torch import Tensor

from ds_distill.cache.codecs import Encoded, TailShape, VocabularyCodec
from ds_distill.cache.codecs.base import TopK


class _Ids:
    """K ids in the least whole bytes."""

    def __init__(self, vocabulary: int, count: int) -> None:
        bits = (vocabulary - 1).bit_length()
        self._fields, self._words = Fields(0, count, bits), field_words(0, count, bits)
        self.num_bytes = (count * bits + 7) // 8

    def pack(self, ids: Tensor) -> Tensor:
        words = torch.zeros(len(ids), self._words, dtype=torch.int32)
        self._fields.write(words, ids)
        return words.view(torch.uint8)[:, : self.num_bytes]

    def unpack(self, payload: Tensor) -> Tensor:
        words = torch.nn.functional.pad(payload, (0, 4 * self._words - self.num_bytes))
        return self._fields.read(words.contiguous().view(torch.int32)).long()


class DistillKit(VocabularyCodec):
    name: ClassVar[str] = "distillkit"

    def __init__(
        self,
        vocabulary: int,
        k: int,
        exact_k: int,
        terms: tuple[float, ...] = (),
        true_tail: bool = False,
    ) -> None:
        """terms: powers of t, 0.5 the square root. true_tail: tell the decoder the true mass of
        the tail, in bytes that are not counted."""
        super().__init__(vocabulary)
        self._k, self._exact, self._true_tail = k, exact_k, true_tail
        t = torch.arange(k - exact_k, dtype=torch.float64)
        self._terms = torch.stack([t**power for power in terms], 1) if terms else None
        self._ids = _Ids(vocabulary, k)
        self._tail: Tensor | None = None

    @property
    def width(self) -> int:
        fitted = 0 if self._terms is None else 4 * self._terms.shape[1]
        return 2 * self._exact + fitted + self._ids.num_bytes

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError("a rival is not stored")

    def _encode(self, logits: Tensor, lse: Tensor) -> Encoded:
        values, ids = torch.topk(logits - lse, self._k, dim=1)
        if self._true_tail:
            self._tail = torch.logsumexp(logits.scatter(1, ids, -math.inf), 1) - lse[:, 0]
        parts = [values[:, : self._exact].to(torch.bfloat16).view(torch.uint8)]
        if self._terms is not None:
            fit = values[:, self._exact :].double() @ torch.linalg.pinv(self._terms).T
            parts.append(fit.float().contiguous().view(torch.uint8))
        parts.append(self._ids.pack(ids))
        return Encoded(torch.cat(parts, 1))

    def _read(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        exact, rest = payload[:, : 2 * self._exact], payload[:, 2 * self._exact :]
        values = exact.contiguous().view(torch.bfloat16).float()
        if self._terms is not None:
            size = 4 * self._terms.shape[1]
            fit = rest[:, :size].contiguous().view(torch.float32)
            values = torch.cat((values, fit @ self._terms.float().T), 1)
            rest = rest[:, size:]
        return values, self._ids.unpack(rest)

    def decode(self, encoded: Encoded) -> TopK:
        values, ids = self._read(encoded.payload)
        rest = torch.log((1 - values.exp().sum(1)).clamp(min=0))
        return TopK(values, ids, rest)

    def log_probs(self, encoded: Encoded) -> Tensor:
        values, ids = self._read(encoded.payload)
        if self._tail is not None:
            tail = self._tail
            mass = torch.log(-torch.expm1(tail))[:, None]
            values = values - torch.logsumexp(values, 1, keepdim=True) + mass
            return TailShape.even(self.vocabulary).spread(TopK(values, ids, tail))
        missing = (1 - values.exp().sum(1, keepdim=True)) / (self.vocabulary - self._k)
        whole = missing.clamp(min=1e-8).log().expand(-1, self.vocabulary).clone()
        return torch.log_softmax(whole.scatter_(1, ids, values), 1)


class HalfTopK(VocabularyCodec):
    name: ClassVar[str] = "float16"

    def __init__(self, vocabulary: int, k: int) -> None:
        super().__init__(vocabulary)
        self._k, self._ids = k, _Ids(vocabulary, k)

    @property
    def width(self) -> int:
        return 2 * self._k + 2 + self._ids.num_bytes

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError("a rival is not stored")

    def _encode(self, logits: Tensor, lse: Tensor) -> Encoded:
        values, ids = torch.topk(logits, self._k, dim=1)
        tail = torch.logsumexp(logits.scatter_(1, ids, -math.inf), 1, keepdim=True)
        numbers = (torch.cat((values, tail), 1) - lse).half().view(torch.uint8)
        return Encoded(torch.cat((numbers, self._ids.pack(ids)), 1))

    def decode(self, encoded: Encoded) -> TopK:
        size = 2 * self._k + 2
        numbers = encoded.payload[:, :size].contiguous().view(torch.float16).float()
        numbers = torch.log_softmax(numbers, 1)
        return TopK(numbers[:, :-1], self._ids.unpack(encoded.payload[:, size:]), numbers[:, -1])

    def log_probs(self, encoded: Encoded) -> Tensor:
        return TailShape.even(self.vocabulary).spread(self.decode(encoded))


def rivals(vocabulary: int) -> dict[str, VocabularyCodec]:
    """DistillKit's two recommendations and what it compares itself with, as they are and with
    the tail's true mass for nothing; and 64 entries in float16."""
    shapes: dict[str, tuple[int, int, tuple[float, ...]]] = {
        "recommended": (128, 16, (0, 1, 2, 3, 4, 0.5)),
        "budget": (50, 1, (0, 1, 0.5)),
        "top-32": (32, 32, ()),
    }
    codecs: dict[str, VocabularyCodec] = {"float16 64": HalfTopK(vocabulary, 64)}
    for name, shape in shapes.items():
        codecs[f"distillkit {name}"] = DistillKit(vocabulary, *shape)
        codecs[f"distillkit+tail {name}"] = DistillKit(vocabulary, *shape, true_tail=True)
    return codecs
