"""The codecs: how a cache keeps distributions over a vocabulary."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from ds_distill.recipe.part import OneOf, Part

CODECS: dict[str, type[CodecSettings]] = {}

_THRESHOLDS = (5e-4, 1e-3, 2e-3, 4e-3, 1e-2)
_COMPACT = {1.0: (311.0, 187.0, 104.2, 60.8, 36.1), 2.0: (121.1, 50.1, 31.1, 25.5, 23.3)}
"""Bytes per row of `compact` at each threshold, by temperature (docs/studies/codecs.md): of one
teacher and text, so no more than the right order of size."""


class CodecSettings(Part):
    """How a cache keeps distributions over a vocabulary. It runs a `VocabularyCodec`."""

    kind_of_part, key, table = "codec", "name", CODECS

    keeps_logits: ClassVar[bool] = False
    """Whether what is read from the cache is the teacher's logits, to rounding."""
    less_loss: ClassVar[str]
    """What to set where it loses too much."""

    name: str
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the distributions: that of the kl term that reads them."""

    def row_bytes(self, vocabulary: int, size: int) -> float:
        """About how many bytes a row takes, for the plan; without a method of its own, those of all
        logits. size: of a number in the phase's dtype."""
        return float(vocabulary * size)


class Compact(CodecSettings):
    """The entries that a row needs, and the shape of its tail."""

    runs = "ds_distill.cache.codecs.compact:CompactCodec"
    less_loss = "a lower codec.threshold, or codec: {name: dense}"

    name: Literal["compact"] = "compact"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """The probability from which entries are kept."""

    def row_bytes(self, vocabulary: int, size: int) -> float:
        nearest = min(_COMPACT, key=lambda known: abs(known - self.temperature))
        at, *known = np.log([self.threshold, *_THRESHOLDS])
        return float(np.interp(at, known, _COMPACT[nearest]))


class Dense(CodecSettings):
    """All logits, in the phase's dtype."""

    keeps_logits = True
    less_loss = "dtype: float32"

    name: Literal["dense"] = "dense"


Codec = Annotated[CodecSettings, OneOf("codec", "name", CODECS, default="compact")]
