"""The codecs: how a cache keeps distributions over a vocabulary."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_distill.recipe.part import OneOf, Part

CODECS: dict[str, type[CodecSettings]] = {}


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


class Compact(CodecSettings):
    """The entries that a row needs, and the shape of its tail."""

    runs = "ds_distill.cache.codecs.compact:CompactCodec"
    less_loss = "a lower codec.threshold, or codec: {name: dense}"

    name: Literal["compact"] = "compact"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """The probability from which entries are kept."""


class Dense(CodecSettings):
    """All logits, in the phase's dtype."""

    keeps_logits = True
    less_loss = "dtype: float32"

    name: Literal["dense"] = "dense"


Codec = Annotated[CodecSettings, OneOf("codec", "name", CODECS, default="compact")]
