"""Examples that are lists of words: where each word's token stands in a model's view."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
from tokenizers import Regex, pre_tokenizers

from ds_distill.data.columns import as_numpy, flat_lists
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import LETTER_WITHOUT_BLANKS

VERSION = 3
"""Part of the names of files that are made from words: raise it when the same rows give others."""

NO_TOKEN = -1
"""The position of a word that has no token in a view: the tokenizer drops it, or it is cut off."""


@dataclass(frozen=True)
class Words:
    """The words of N windows, R in all, one window's after the other's. A text, or the context of a
    question, that is too long for a view is several windows. A word that is in several is a row of
    each, and belongs to one of them."""

    offsets: np.ndarray
    """int64 [N + 1]: the first word of each window, and R."""
    counted: np.ndarray
    """bool [R]: whether a word belongs to its window, and has a token in the view of every model of
    the recipe. Others are rows of no loss, and those without a token count as O in every score."""
    text: np.ndarray | None = None
    """int64 [N]: the number of each window's text, ascending. None: each is the whole of one."""
    owned: np.ndarray | None = None
    """bool [R]: whether a word belongs to its window. None: all do."""
    spans: np.ndarray | None = None
    """int64 [R, 2]: of contexts: first character and end of each word."""
    answer_offsets: np.ndarray | None = None
    """int64 [N + 1]: of contexts: the first right answer of each, and A. A context's first window
    has all of them, the others none."""
    answers: np.ndarray | None = None
    """int64 [A, 2]: first character and end of each. They may overlap."""

    @staticmethod
    def of(split: datasets.Dataset) -> Words:
        """Of a prepared split; see `ds_distill.data.windows`."""
        offsets, counted = flat_lists(split, "counted")
        owned = flat_lists(split, "owned")[1]
        words = Words(offsets, counted & owned, as_numpy(split, "number"), owned)
        if "answer_starts" not in split.column_names:
            return words
        return replace(
            words,
            spans=_spans_of(split, "starts", "ends"),
            answer_offsets=flat_lists(split, "answer_starts")[0],
            answers=_spans_of(split, "answer_starts", "answer_ends"),
        )

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def examples(self) -> np.ndarray:
        """int64 [R]: the window of each word."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def of_examples(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the words of some windows, int [B], in their order: int64 [n]."""
        return _of_lists(self.offsets, indices)[1]

    @property
    def firsts(self) -> np.ndarray:
        """The first window of each text: int64 [T]."""
        if self.text is None:
            return np.arange(len(self))
        return np.unique(self.text, return_index=True)[1]

    def of_whole_texts(self, chosen: np.ndarray) -> np.ndarray:
        """Of chosen windows, bool [N], those of whose text all are: bool [N]."""
        return chosen if self.text is None else ~np.isin(self.text, self.text[~chosen])

    def whole(self) -> tuple[np.ndarray, Words]:
        """The rows of the texts' words, each word once, in their order: int64 [W]; and the words of
        these T texts."""
        if self.text is None or self.owned is None:
            return np.arange(len(self.counted)), self
        rows = np.flatnonzero(self.owned)  # in the order of the texts and of their words
        _, text = np.unique(self.text, return_inverse=True)
        lengths = np.bincount(text[self.examples[rows]], minlength=len(self.firsts))
        answers = self.answer_offsets
        return rows, Words(
            np.concatenate([[0], np.cumsum(lengths)]),
            self.counted[rows],
            spans=None if self.spans is None else self.spans[rows],
            answer_offsets=None if answers is None else answers[[*self.firsts, -1]],
            answers=self.answers,
        )

    def at(self, indices: np.ndarray) -> Words:
        """Those of some windows; where they are of texts whole, in ascending order and of a text
        all."""
        offsets, rows = _of_lists(self.offsets, indices)
        of_windows = {"text": self.text}
        of_rows = {"counted": self.counted, "owned": self.owned, "spans": self.spans}
        found = {name: of[indices] for name, of in of_windows.items() if of is not None}
        found |= {name: of[rows] for name, of in of_rows.items() if of is not None}
        if self.answer_offsets is not None and self.answers is not None:
            found["answer_offsets"], kept = _of_lists(self.answer_offsets, indices)
            found["answers"] = self.answers[kept]
        return Words(offsets, **found)


def _spans_of(split: datasets.Dataset, starts: str, ends: str) -> np.ndarray:
    """int64 [..., 2]"""
    both = [flat_lists(split, name)[1] for name in (starts, ends)]
    return np.stack(both, axis=1).astype(np.int64)


def _of_lists(offsets: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some lists, int [B], of those that begin at `offsets`, int64 [N + 1]: where each then begins,
    int64 [B + 1], and the numbers of their values, int64 [n]. It looks at these lists alone:
    differences over all N would be most of a micro-batch's time."""
    lengths = offsets[indices + 1] - offsets[indices]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return ends, np.repeat(offsets[indices] - ends[:-1], lengths) + np.arange(ends[-1])


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
