"""Cut long texts into windows that models can read whole.

A window is a range of the text's characters, from there on an example like any other: it is found
by its own text, so a cache of it does not depend on a tokenizer. It ends between words, and it is
as long as every tokenizer allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from ds_distill.data.cutting import (
    KEYS,
    by_tokens,
    made_of,
    of_whole_example,
    token_features,
    with_keys,
)
from ds_distill.data.word_tokens import TextCutter, Views
from ds_distill.keys import content_keys


def split_long(
    examples: datasets.Dataset,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    max_length: int,
    file: Path | None = None,
) -> datasets.Dataset:
    """Each text as windows that have at most `max_length` tokens, special tokens included, by all
    tokenizers. A text that fits stays as it is.

    examples: columns `text`, `label`, `key_hi`, `key_lo`, `copy` and `group`. The result has these,
    the last two as the whole text has them, and each tokenizer's tokens, see `token_features`. A
    word that is longer than a window is cut inside. file: where it is written.

    Raises ValueError for pairs of texts.
    """
    if "text_b" in examples.column_names:
        raise ValueError("pairs of texts cannot be cut into windows")
    chosen = by_tokens(tokenizers)
    cutter = TextCutter([*chosen.values()])
    views = [Views(tokenizer, max_length) for tokenizer in chosen.values()]
    rooms = [of_one.room for of_one in views]
    kept = {"label": datasets.Value("int64"), **of_whole_example(examples)}

    def windows(batch: dict[str, list[Any]], numbers: Sequence[int]) -> list[dict[str, Any]]:
        rows = []
        for at, tokens in enumerate(cutter.tokens(batch["text"])):
            text, whole = batch["text"][at], {name: batch[name][at] for name in kept}
            for start, end, found in cutter.windows(text, tokens, rooms):
                row = {"text": text[start:end], **whole}
                for name, view, of_one in zip(chosen, views, found, strict=True):
                    row[f"{name}:input_ids"] = view.view(of_one.ids)[0]["input_ids"]
                rows.append(row)
        return with_keys(rows, content_keys([row["text"] for row in rows]))

    features = {
        "text": datasets.Value("string"),
        **kept,
        **KEYS,
        **token_features(chosen, of_words=False, pairs=False),
    }
    return made_of(examples, windows, features, "splits long texts", file)
