"""Codecs: compressed distributions over a vocabulary."""

from __future__ import annotations

from typing import Any

from ds_distill.cache.codecs.base import Encoded, StoredLogits, StoredNumbers, VocabularyCodec
from ds_distill.cache.codecs.compact import CompactCodec
from ds_distill.cache.codecs.tail import TailShape
from ds_distill.errors import UserError
from ds_distill.recipe.codecs import CODECS

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
    """The codec that a manifest describes. Raises UserError when there is none of that name."""
    given = dict(values)
    name = given.pop("codec", None)
    known = [known for known, settings in CODECS.items() if settings.runs is not None]
    if name not in known:
        raise UserError(
            f"the cache was built with codec {name!r}; this version has {', '.join(known)}. Remove "
            "its folder and build it again."
        )
    codec: type[VocabularyCodec] = CODECS[name].load()
    return codec.from_json(given)
