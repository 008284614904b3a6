"""Codecs: compressed distributions over a vocabulary."""

from __future__ import annotations

from typing import Any

from ds_distill.cache.codecs.base import Encoded, StoredLogits, StoredNumbers, VocabularyCodec
from ds_distill.cache.codecs.compact import CompactCodec
from ds_distill.cache.codecs.tail import TailShape
from ds_distill.recipe.codecs import CODECS
from ds_distill.recipe.entry_points import load_entry_points

__all__ = [
    "CompactCodec",
    "Encoded",
    "StoredLogits",
    "StoredNumbers",
    "TailShape",
    "VocabularyCodec",
    "codec_from_json",
]


def codec_from_json(values: dict[str, Any]) -> VocabularyCodec:
    """The codec that a manifest describes. Raises ValueError when there is no such codec."""
    given = dict(values)
    name = given.pop("codec", None)
    load_entry_points()
    known = [entry.name for entry in CODECS.values() if entry.implementation is not None]
    if name not in known:
        raise ValueError(f"there is no codec {name!r}, only {', '.join(known)}")
    codec: type[VocabularyCodec] = CODECS[name].load()
    try:
        return codec.from_json(given)
    except (KeyError, TypeError) as fault:
        raise ValueError(f"codec {name!r} cannot be built from {sorted(given)}: {fault}") from None
