"""Whole distributions as a codec: exact, for tests of codecs and of their comparison."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_distill.cache.codecs.base import Encoded, VocabularyCodec

_DTYPES = {dtype: getattr(torch, dtype) for dtype in ("float32", "float16", "bfloat16")}


class DenseCodec(VocabularyCodec):
    """Log-probabilities of all V entries, in order. In `float32` exact."""

    name: ClassVar[str] = "dense"

    def __init__(self, vocabulary: int, dtype: str = "float32") -> None:
        super().__init__(vocabulary)
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}: one of {', '.join(_DTYPES)} is needed")
        self.dtype = dtype

    @property
    def width(self) -> int:
        return self.vocabulary * _DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        return {"codec": self.name, "vocabulary": self.vocabulary, "dtype": self.dtype}

    def _encode(self, logits: Tensor, lse: Tensor) -> Encoded:
        return Encoded((logits - lse).to(_DTYPES[self.dtype]).view(torch.uint8))

    def log_probs(self, encoded: Encoded) -> Tensor:
        payload = encoded.payload
        if payload.dtype != torch.uint8 or payload.ndim != 2 or payload.shape[1] != self.width:
            raise ValueError(
                f"{payload.dtype} {tuple(payload.shape)} for rows of {self.width} bytes: "
                f"uint8 [rows, {self.width}] is needed"
            )
        return payload.contiguous().view(_DTYPES[self.dtype]).float()
