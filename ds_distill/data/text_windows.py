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
from transformers import PreTrainedTokenizerBase

from ds_distill.data.columns import as_numpy, flat_lists
from ds_distill.data.cutting import cut, lists_of
from ds_distill.data.tokenizer import tokenizer_fingerprint
from ds_distill.data.word_tokens import WindowViews
from ds_distill.data.words import Words, word_keys
from ds_distill.process.activity import mark

VERSION = "windows of texts 3"
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
        return TextWindows(offsets, counted & owned, as_numpy(split, "text"), owned)

    def at(self, indices: np.ndarray) -> TextWindows:
        """Those of some windows, in ascending order; of a text all windows or none."""
        words, rows = super().at(indices), self.of_examples(indices)
        return TextWindows(words.offsets, words.counted, self.text[indices], self.owned[rows])

    @property
    def firsts(self) -> np.ndarray:
        return np.unique(self.text, return_index=True)[1]

    def of_whole_texts(self, chosen: np.ndarray) -> np.ndarray:
        return ~np.isin(self.text, self.text[~chosen])

    def whole(self) -> tuple[np.ndarray, Words]:
        rows = np.flatnonzero(self.owned)  # in the order of the texts and of their words
        _, of_window = np.unique(self.text, return_inverse=True)
        lengths = np.bincount(of_window[self.examples[rows]], minlength=len(self.firsts))
        return rows, Words(np.concatenate([[0], np.cumsum(lengths)]), self.counted[rows])


def prepare(
    examples: datasets.Dataset, tokenizers: list[PreTrainedTokenizerBase], max_length: int
) -> datasets.Dataset:
    """Each list of words as windows of at most `max_length` tokens in every model's view.

    examples: columns as of `words.EXAMPLES`, and marks.

    The result has each tokenizer's tokens, see `cutting`; and `counted`, list of bool: of each word
    whether it has a token in the view of every model. Teachers and student meet on these words,
    whatever their tokenizers are. Where a list is too long, it also has `text`: the number of each
    window's list; `whole_hi`, `whole_lo`: that list's content key; `first`: the number of the
    window's first word in it; and `owned`: of each word whether it belongs to the window. Marks are
    those of the whole list.
    """
    cutter = WindowViews(tokenizers, max_length)

    def windows(batch: dict[str, list[Any]], numbers: list[int]) -> list[dict[str, Any]]:
        mark("cuts long texts into windows", done=len(numbers))
        rows = []
        for at, tokens in enumerate(cutter.tokens(batch["words"])):
            row = {name: values[at] for name, values in batch.items()}
            for first, end, owned, views in cutter.windows(tokens):
                here = {name: row[name][first:end] for name in ("words", "label")}
                here |= cutter.columns(views)
                here |= {"whole_hi": row["key_hi"], "whole_lo": row["key_lo"], "first": first}
                rows.append({**row, **here, "text": numbers[at], "owned": owned})
        keys = word_keys([row["words"] for row in rows])
        for row, (high, low) in zip(rows, keys, strict=True):
            row.update(key_hi=high, key_lo=low)
        return rows

    state = [VERSION, max_length, *map(tokenizer_fingerprint, tokenizers)]
    features = {**examples.features, **_WINDOWS, **cutter.features}
    found = cut(examples, windows, features, state, _AT_ONCE)
    return found if len(found) > len(examples) else found.remove_columns(list(_WINDOWS))


_WINDOWS = {
    **dict.fromkeys(("text", "whole_hi", "whole_lo", "first"), datasets.Value("int64")),
    **lists_of({"owned": "bool"}),
}
