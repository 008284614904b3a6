"""How many tokens texts have, and how much of them is cut. Nothing here needs torch."""

from __future__ import annotations

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_distill.data.columns import example_keys
from ds_distill.keys import hash_keys
from ds_distill.process.activity import mark

SAMPLE = 1_000
"""Examples of which `share_cut` reads no more."""

_SAMPLED = 110
"""Purpose of hashes: which examples these are."""


def token_lengths(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str] | list[list[str]],
    texts_b: list[str] | None = None,
) -> np.ndarray:
    """Tokens of each text, list of words, or pair of texts, uncut: int64 [N]."""
    encoded = tokenizer(
        texts,
        texts_b,
        is_split_into_words=bool(texts) and isinstance(texts[0], list),
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning of what is longer than the model's maximum
    )
    return np.array([len(ids) for ids in encoded["input_ids"]], dtype=np.int64)


BEGINNING = 10_000
"""Characters of a text, or words of a list, that are tokenised to know its length: the rest counts
as many tokens. A text of 20 MB took 20 s."""


def example_lengths(examples: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Tokens of each example, uncut: int64 [N]; of long ones as their beginnings have."""
    columns = examples.column_names
    first = examples["words" if "words" in columns else "text"][:]
    second = examples["text_b"][:] if "text_b" in columns else None
    begun, size = [text[:BEGINNING] for text in first], np.array([len(text) for text in first])
    read = np.minimum(size, BEGINNING)
    if second is not None:
        sizes = np.array([len(text) for text in second])
        size, read = size + sizes, read + np.minimum(sizes, BEGINNING)
    begun_b = None if second is None else [text[:BEGINNING] for text in second]
    lengths = token_lengths(tokenizer, begun, begun_b)
    return np.asarray(lengths * size // np.maximum(read, 1))


def share_cut(
    examples: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> float:
    """The share of the tokens that are thrown away where examples are cut at `max_length`; of a
    sample, if there are many.

    examples: columns as of `Source.read`.
    """
    hashes = hash_keys(example_keys(examples), _SAMPLED)
    sample = examples.select(np.sort(np.argsort(hashes, kind="stable")[:SAMPLE]))
    mark("counts the tokens of a sample")
    lengths = example_lengths(sample, tokenizer)
    total = int(lengths.sum())
    return float(np.maximum(lengths - max_length, 0).sum() / total) if total else 0.0
