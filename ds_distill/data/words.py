"""Examples that are lists of words: their keys, and the words of a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Regex, pre_tokenizers

from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import LETTER_WITHOUT_BLANKS

VERSION = 3
"""Part of the names of files that are made from words: raise it when the same rows give others."""


def word_keys(examples: Sequence[Sequence[Any]]) -> np.ndarray:
    """Content keys of lists of words, or of lists of such lists: int64 [N, 2]. Those that differ
    have keys that differ, also where the words are the same letters cut elsewhere."""
    return content_keys([json.dumps(list(words), ensure_ascii=False) for words in examples])


def texts_of(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """The words that stand at some characters of a text."""
    return [text[start:end] for start, end in spans]


def words_of(text: str) -> list[tuple[int, int]]:
    """The words of a text, first character and end: what stands between white space, and each
    punctuation mark, as BERT's tokenizers cut it before they look at their vocabulary; and each
    letter of a script that is written without blanks, or a sentence would be a word."""
    return [span for _, span in _CUT.pre_tokenize_str(text)]


_CUT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.BertPreTokenizer(),
        pre_tokenizers.Split(Regex(LETTER_WITHOUT_BLANKS), "isolated"),
    ]
)
