"""The windows in which models read a list of words that is too long for one view.

A window is some of the words in their order, from there on an example like any other, found by its
own content key. It is as long as every tokenizer of the recipe allows, so that the same words are
in every model's view. Windows overlap, and a word counts in one of them: where it has most around
it. `predict` reads texts in the same windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from ds_distill.data.groups import MARKS
from ds_distill.data.word_windows import owners, ranges, token_counts
from ds_distill.data.words import Words, flat_lists, word_keys
from ds_distill.data.words import prepare as find_common
from ds_distill.models.configuration import tokenizer_fingerprint
from ds_distill.progress import mark

VERSION = "windows of texts 1"
"""Part of the fingerprint: change it when the same texts give other windows."""

_AT_ONCE = 1000


@dataclass(frozen=True)
class TextWindows(Words):
    """The words of N windows of texts, R in all. A word that is in several windows is a row of
    each, and belongs to one of them; in the others it does not count."""

    text: np.ndarray
    """int64 [N]: the number of each window's text, ascending."""
    owned: np.ndarray
    """bool [R]: whether a word belongs to its window."""

    @staticmethod
    def of(split: datasets.Dataset) -> TextWindows:
        """Of a prepared split."""
        offsets, counted = flat_lists(split, "counted")
        owned = flat_lists(split, "owned")[1]
        text = split.select_columns("text").with_format("numpy")["text"][:]
        return TextWindows(offsets, counted & owned, text.astype(np.int64), owned)

    def at(self, indices: np.ndarray) -> TextWindows:
        """Those of some windows, in ascending order; of a text all windows or none."""
        words, rows = super().at(indices), self.of_examples(indices)
        return TextWindows(words.offsets, words.counted, self.text[indices], self.owned[rows])

    @property
    def firsts(self) -> np.ndarray:
        return np.unique(self.text, return_index=True)[1]

    def whole(self) -> tuple[np.ndarray, Words]:
        rows = np.flatnonzero(self.owned)  # in the order of the texts and of their words
        _, of_window = np.unique(self.text, return_inverse=True)
        lengths = np.bincount(of_window[self.examples[rows]], minlength=len(self.firsts))
        return rows, Words(np.concatenate([[0], np.cumsum(lengths)]), self.counted[rows])


def prepare(
    examples: datasets.Dataset, tokenizers: list[PreTrainedTokenizerBase], max_length: int
) -> datasets.Dataset:
    """Each list of words as windows of at most `max_length` tokens in every model's view; see
    `words.prepare` for `counted`.

    examples: columns as of `words.EXAMPLES`, and `MARKS`. Where a list is too long, the result also
        has `text`: the number of each window's list; and `owned`: of each word whether it belongs
        to the window. Marks are those of the whole list.
    """
    rooms = [max_length - tokenizer.num_special_tokens_to_add() for tokenizer in tokenizers]

    def windows(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        mark("cuts long texts into windows")
        tokens = [token_counts(tokenizer, batch["words"]) for tokenizer in tokenizers]
        rows = []
        for at, number in enumerate(numbers):
            row = {name: values[at] for name, values in batch.items()}
            found = list(ranges([of_one[at] for of_one in tokens], rooms))
            owner = owners(found, len(row["words"]))
            for window, (first, end) in enumerate(found):
                here = {name: row[name][first:end] for name in ("words", "label")}
                rows.append({**row, **here, "text": number, "owned": owner[first:end] == window})
        keys = word_keys([row["words"] for row in rows])
        for row, (high, low) in zip(rows, keys, strict=True):
            row.update(key_hi=high, key_lo=low)
        return {name: [row[name] for row in rows] for name in _FEATURES}

    state = [VERSION, max_length, examples._fingerprint, *map(tokenizer_fingerprint, tokenizers)]
    cut = examples.map(
        windows,
        batched=True,
        with_indices=True,
        batch_size=_AT_ONCE,
        remove_columns=examples.column_names,
        features=_FEATURES,
        new_fingerprint=xxhash.xxh3_64_hexdigest(str(state).encode()),
    )
    return find_common(cut if len(cut) > len(examples) else examples, tokenizers, max_length)


_FEATURES = datasets.Features(
    {
        "words": datasets.List(datasets.Value("string")),
        "label": datasets.List(datasets.Value("int16")),
        **{name: datasets.Value("int64") for name in ("key_hi", "key_lo", *MARKS, "text")},
        "owned": datasets.List(datasets.Value("bool")),
    }
)
