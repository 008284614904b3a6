"""Random texts in place of real ones (Krishna and others, Thieves on Sesame Street, ICLR 2020)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash

from ds_distill.data.columns import BATCH, build_once, text_schema, write_columns
from ds_distill.keys import content_keys, hash_keys
from ds_distill.recipe.data import Randomise

VERSION = 1
"""Part of the file's name: raise it when the same texts give other random ones."""

_PASSAGE, _STARTER, _QUESTION = 106, 107, 108
"""Purposes of the hashes."""


def randomised(
    examples: datasets.Dataset, settings: Randomise, cache_folder: Path
) -> datasets.Dataset:
    """As many examples of random text, without labels; made once and then read from a file.

    examples: columns `text` and perhaps `text_b`. The words of all texts (of pairs: of `text_b`)
    are drawn by their frequency, and text number i is as long as the example's.
    """
    state = [VERSION, examples._fingerprint, settings.model_dump()]
    digest = xxhash.xxh3_128_hexdigest(json.dumps(state).encode())
    path = cache_folder / f"randomised-{digest}.arrow"
    build_once(path, lambda temporary: _write(examples, settings, temporary))
    return datasets.Dataset.from_file(str(path))


def _write(examples: datasets.Dataset, settings: Randomise, path: Path) -> None:
    pairs = "text_b" in examples.column_names
    words = Unigrams.of(examples, "text_b" if pairs else "text")

    def batches() -> Iterator[list[Any]]:
        for first in range(0, len(words.lengths), BATCH):
            numbers = np.arange(first, min(first + BATCH, len(words.lengths)))
            passages = words.passages(numbers, settings.seed)
            texts = [questions(passages, numbers, settings)] if pairs else []
            texts.append([" ".join(passage) for passage in passages])
            keys = content_keys(*texts)
            yield [*texts, np.full(len(numbers), -1), keys[:, 0], keys[:, 1]]

    write_columns(path, text_schema(pairs), batches())


@dataclass(frozen=True)
class Unigrams:
    """How often each word occurs in some texts, and how long these are. Words are what white space
    separates."""

    words: np.ndarray
    """str [V], sorted, so that draws do not depend on the order of the texts."""
    counts: np.ndarray
    """int64 [V]."""
    lengths: np.ndarray
    """Words of each text: int64 [N]."""

    @staticmethod
    def of(examples: datasets.Dataset, column: str) -> Unigrams:
        counts: Counter[str] = Counter()
        lengths = []
        for batch in examples.select_columns(column).iter(BATCH):
            for text in batch[column]:
                words = text.split()
                counts.update(words)
                lengths.append(len(words))
        words = sorted(counts)
        return Unigrams(
            np.array(words, dtype=object),
            np.array([counts[word] for word in words], dtype=np.int64),
            np.array(lengths, dtype=np.int64),
        )

    def passages(self, numbers: np.ndarray, seed: int) -> list[list[str]]:
        """Random texts number `numbers`, int64 [n]: each a function of seed and number."""
        lengths = self.lengths[numbers]
        ends = np.cumsum(lengths)
        within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        uniform = _uniform(np.repeat(numbers, lengths), seed, _PASSAGE, within)
        bounds = np.cumsum(self.counts)
        total = bounds[-1] if len(bounds) else 0
        drawn = self.words[np.searchsorted(bounds, np.floor(uniform * total), side="right")]
        return [part.tolist() for part in np.split(drawn, ends[:-1])]


def questions(passages: list[list[str]], numbers: np.ndarray, settings: Randomise) -> list[str]:
    """A question to each passage: a starter and words of the passage, drawn uniformly."""
    starters = _uniform(numbers, settings.seed, _STARTER) * len(settings.starters)
    positions = np.arange(settings.words)[None]
    draws = _uniform(numbers[:, None], settings.seed, _QUESTION, positions)
    texts = []
    for passage, starter, row in zip(passages, starters.astype(int), draws, strict=True):
        places = (row * len(passage)).astype(int).tolist() if passage else []
        texts.append(" ".join([settings.starters[starter], *(passage[at] for at in places)]))
    return texts


def _uniform(numbers: np.ndarray, seed: int, *stream: int | np.ndarray) -> np.ndarray:
    """Uniform in [0, 1): float64, of the shape to which `numbers` and the stream broadcast."""
    keys = np.stack([numbers, np.full_like(numbers, seed)], axis=-1)
    top_53_bits = (hash_keys(keys, *stream) >> 11) & (2**53 - 1)
    return top_53_bits * 2.0**-53
