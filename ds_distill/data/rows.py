"""The rows of batches, which losses are of: examples, words, tokens of words, starts and ends of
answers. Those of masked-LMs are in `ds_distill.data.masking`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.data.batches import WORDS, Examples, Rows
from ds_distill.data.labels import is_labelled
from ds_distill.data.tokenise import TokenTable
from ds_distill.data.words import NO_TOKEN
from ds_distill.types import LACKING, Signals
from ds_distill.views import PaddedView

Views = Mapping[TokenTable, PaddedView]


def text_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row per example. See `RowsOf`."""
    known = torch.from_numpy(is_labelled(examples.labels)).nonzero()[:, 0]
    return Rows(
        examples=torch.arange(len(indices)),
        labels=torch.from_numpy(examples.labels),
        sets={"all": torch.arange(len(indices)), "labelled": known},
        views=dict(views),
        noun="examples",
    )


def word_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row per word of lists of words, in every view at the word's first token.

    The words that count are the same whichever models run: see `Words.counted`. A word without a
    token in a view is read at its first position and is a row that no loss counts, so that the rows
    of a cache are the words and nothing else.
    """
    assert examples.words is not None, "examples of words"
    of_row, counted = torch.from_numpy(examples.words.examples), examples.words.counted
    placed = {}
    for table, view in views.items():
        first = table.first_tokens(indices)
        assert not (counted & (first == NO_TOKEN)).any(), "words that count have a token"
        positions = of_row * view.input_ids.shape[1] + torch.from_numpy(first).clamp(min=0)
        placed[table] = replace(view, positions=positions)
    labels, counts = torch.from_numpy(examples.labels), torch.from_numpy(counted)
    return Rows(
        examples=of_row,
        labels=labels,
        sets={
            WORDS: torch.arange(len(labels)),
            "all": counts.nonzero()[:, 0],
            "labelled": (counts & (labels >= 0)).nonzero()[:, 0],
        },
        views=placed,
        noun="words",
    )


def word_token_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """A row per token of a word, for a training on tags alone. Of one model."""
    assert examples.words is not None, "examples of words"
    [(table, view)] = views.items()
    word, position = table.word_tokens(indices)
    of_row = torch.from_numpy(examples.words.examples[word])
    counts = torch.from_numpy(examples.words.counted[word])
    labels = torch.from_numpy(examples.labels[word])
    positions = of_row * view.input_ids.shape[1] + torch.from_numpy(position)
    return Rows(
        examples=of_row,
        labels=labels,
        sets={
            "all": counts.nonzero()[:, 0],
            "labelled": (counts & (labels >= 0)).nonzero()[:, 0],
        },
        views={table: replace(view, positions=positions)},
        noun="tokens",
    )


def span_rows(examples: Examples, indices: np.ndarray, views: Views, epoch: int) -> Rows:
    """Of each window of a question's context two rows, where the answer starts and where it ends.

    The classes of a row are the window's first token, which stands for no answer, and the tokens of
    its context; a batch has as many as its longest context. All views have the same tokens.
    """
    assert examples.windows is not None, "examples of windows"
    candidates = torch.from_numpy(examples.windows.candidates)
    labels = torch.from_numpy(examples.labels).flatten()
    return Rows(
        examples=torch.arange(len(indices)).repeat_interleave(2),
        labels=labels,
        sets={"all": torch.arange(len(labels)), "labelled": (labels >= 0).nonzero()[:, 0]},
        views={table: replace(view, candidates=candidates) for table, view in views.items()},
        noun="starts and ends",
        cached=lambda signals: cut_to(candidates, signals),
    )


def cut_to(candidates: torch.Tensor, signals: Signals) -> Signals:
    """Cached signals with the classes that a batch has. Raises ValueError where they have others;
    see `check_cached_rows`.

    candidates: int64 [B, K], see `Windows.candidates`.
    """
    logits = signals.logits
    known = (candidates >= 0).repeat_interleave(2, dim=0)
    if not torch.equal(logits != LACKING, F.pad(known, (0, logits.shape[1] - known.shape[1]))):
        raise ValueError("the cache has logits of other tokens than the batch's")
    return replace(signals, output=logits[:, : known.shape[1]])
