"""The codecs: how a cache keeps distributions over a vocabulary."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_distill.recipe.entry import CodecEntry
from ds_distill.recipe.section import Count, Section


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


class TopK(CodecSettings):
    """A number of a row's likeliest entries and the tail's mass: decoded fast, but of a flat
    teacher much is lost (docs/studies/codecs.md)."""

    name: Literal["topk"] = "topk"
    entries: Count = 64
    """Of a row."""


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
            name="topk",
            settings=TopK,
            implementation="ds_distill.cache.codecs.topk:TopKCodec",
            mixes=False,
            less_loss="codec: {name: compact}, or {name: dense}, or more entries",
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
