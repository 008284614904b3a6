"""The codecs: how a cache keeps distributions over a vocabulary."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_distill.recipe.entry import CodecEntry
from ds_distill.recipe.section import Section


class CodecSettings(Section):
    """How a cache keeps distributions over a vocabulary."""

    name: str
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the distributions: that of the kl term that reads them."""


class Compact(CodecSettings):
    """The entries that a row needs, and the shape of its tail."""

    name: Literal["compact"] = "compact"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """The probability from which entries are kept."""


class Dense(CodecSettings):
    """All logits, in the phase's dtype."""

    name: Literal["dense"] = "dense"


CODECS: dict[str, CodecEntry] = {
    entry.name: entry
    for entry in (
        CodecEntry(
            name="compact",
            settings=Compact,
            implementation="ds_distill.cache.codecs.compact:CompactCodec",
            less_loss="a lower codec.threshold, or codec: {name: dense}",
        ),
        CodecEntry(
            name="dense",
            settings=Dense,
            implementation=None,
            keeps_logits=True,
            less_loss="dtype: float32",
        ),
    )
}
