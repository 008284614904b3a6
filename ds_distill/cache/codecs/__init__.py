"""Codecs: compressed distributions over a vocabulary."""

from __future__ import annotations

from typing import Any

from ds_distill.cache.codecs.base import Encoded, StoredLogits, VocabularyCodec
from ds_distill.cache.codecs.compact import CompactCodec
from ds_distill.cache.codecs.tail import TailShape
from ds_distill.cache.codecs.topk import TopKCodec

__all__ = [
    "CompactCodec",
    "Encoded",
    "StoredLogits",
    "TailShape",
    "TopKCodec",
    "VocabularyCodec",
    "codec_from_json",
]


def codec_from_json(values: dict[str, Any]) -> VocabularyCodec:
    """The codec that a manifest describes. Raises ValueError when there is no such codec."""
    given = dict(values)
    name = given.pop("codec", None)
    try:
        if name == TopKCodec.name:
            return TopKCodec(**given)
        if name == CompactCodec.name:
            tail = given.pop("tail")
            return CompactCodec(**given, tail=None if tail is None else TailShape.from_json(tail))
    except (KeyError, TypeError) as fault:
        raise ValueError(f"codec {name!r} cannot be built from {sorted(given)}: {fault}") from None
    raise ValueError(f"there is no codec {name!r}, only compact and topk")
