"""Find entities with a token classifier, such as a run's student, in texts of any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_distill.data.words import NO_TOKEN, encode_words, first_tokens, words_of
from ds_distill.evaluation.words import entities
from ds_distill.models.configuration import load_config, load_tokenizer, usable_length
from ds_distill.models.labels import class_names
from ds_distill.models.load import load_token_classifier
from ds_distill.parts.tags import OUTSIDE

OVERLAP = 4
"""A window shares a quarter of its words with the next one: a word at an edge is read where it has
more around it."""


@dataclass(frozen=True)
class _Window:
    """Some words of a text, in their order."""

    text: int
    first: int
    words: list[str]

    def room(self, total: int) -> np.ndarray:
        """How far each word is from the nearer end of the window that is no end of the text of
        `total` words: int64 [words]."""
        number, last = np.arange(len(self.words)), len(self.words) - 1
        left = number if self.first else np.full(len(number), total)
        right = last - number if self.first + last + 1 < total else np.full(len(number), total)
        return np.minimum(left, right)


class Tagger:
    """A trained token classifier with its tokenizer."""

    columns = (("text",), ("tokens",))
    """Of a file's, those that are read where none are named: the first that are there."""

    def __init__(self, reference: str) -> None:
        """reference: a folder or hub id, resolved. It runs in fp32, on a GPU if there is one.

        Raises UserError when there is no token classifier.
        """
        config = load_config(reference)
        self.labels = class_names(config)
        self.tokenizer = load_tokenizer(reference, of_words=True)
        limit = usable_length(config) or self.tokenizer.model_max_length
        self.max_length = min(limit, self.tokenizer.model_max_length)
        """Tokens of a window; of a run's student those of its training."""
        self.cut = 0
        """Texts that were cut: none, they are read in windows."""
        self._model = load_token_classifier(reference, self.labels, new_head=False).eval()
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")

    def predictions(
        self, texts: Sequence[str | list[str]], batch_size: int = 32
    ) -> list[dict[str, Any]]:
        """Of each text, or list of words: `predicted`, what it found. Of a text entities: their
        `type`, `start` and `end` (characters, the end exclusive), `text`, and `probability`, the
        mean of their words' tags. Of a list of words a tag for each; O of one without a token."""
        spans = [None if isinstance(text, list) else words_of(text) for text in texts]
        words = [
            text if isinstance(text, list) else [text[start:end] for start, end in of_text or ()]
            for text, of_text in zip(texts, spans, strict=True)
        ]
        tagged = self._tag(words, batch_size)
        return [
            {"predicted": tags if of_text is None else _entities(str(text), of_text, tags, shares)}
            for text, of_text, (tags, shares) in zip(texts, spans, tagged, strict=True)
        ]

    def _tag(self, texts: list[list[str]], batch_size: int) -> list[tuple[list[str], np.ndarray]]:
        """Each text's tags, and their probabilities."""
        outside = self.labels.index(OUTSIDE) if OUTSIDE in self.labels else 0
        found = [np.full(len(words), outside) for words in texts]
        shares = [np.ones(len(words)) for words in texts]
        rooms = [np.full(len(words), -1) for words in texts]
        windows = sorted(self._windows(texts), key=lambda window: len(window.words))
        for start in range(0, len(windows), batch_size):
            some = windows[start : start + batch_size]
            for window, (first, logits) in zip(some, self._read(some), strict=True):
                own = slice(window.first, window.first + len(window.words))
                room = window.room(len(texts[window.text]))
                better = (first != NO_TOKEN) & (room > rooms[window.text][own])
                probabilities = logits.softmax(dim=1).numpy()
                rooms[window.text][own][better] = room[better]
                found[window.text][own][better] = probabilities.argmax(axis=1)[better]
                shares[window.text][own][better] = probabilities.max(axis=1)[better]
        return [
            ([self.labels[number] for number in numbers], of_text)
            for numbers, of_text in zip(found, shares, strict=True)
        ]

    @torch.no_grad()
    def _read(self, windows: list[_Window]) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Of each window its words' first tokens, and logits there, float32 [words, C]."""
        encoded = encode_words(self.tokenizer, [w.words for w in windows], self.max_length)
        inputs = self.tokenizer.pad({"input_ids": encoded["input_ids"]}, return_tensors="pt")
        logits = self._model(**inputs.to(self._model.device)).logits.float().cpu()
        for number, window in enumerate(windows):
            first = first_tokens(encoded, number, len(window.words))
            yield first, logits[number][torch.from_numpy(np.maximum(first, 0)).long()]

    def _windows(self, texts: list[list[str]]) -> Iterator[_Window]:
        """Windows of at most `max_length` tokens that cover each text."""
        room = self.max_length - self.tokenizer.num_special_tokens_to_add()
        for text, words in enumerate(texts):
            if not words:
                continue
            encoded = self.tokenizer(words, is_split_into_words=True, add_special_tokens=False)
            of_word = [word for word in encoded.word_ids() if word is not None]
            ends = np.cumsum(np.bincount(of_word, minlength=len(words)))
            first = 0
            while True:
                before = ends[first - 1] if first else 0
                end = max(first + 1, int(np.searchsorted(ends, before + room, side="right")))
                yield _Window(text, first, words[first:end])
                if end >= len(words):
                    break
                first = max(first + 1, end - (end - first) // OVERLAP)


def _entities(
    text: str, spans: list[tuple[int, int]], tags: list[str], shares: np.ndarray
) -> list[dict[str, Any]]:
    [found] = entities([tags], strict=False)
    return [
        {
            "type": kind,
            "start": spans[first][0],
            "end": spans[last][1],
            "text": text[spans[first][0] : spans[last][1]],
            "probability": float(shares[first : last + 1].mean()),
        }
        for kind, first, last in sorted(found, key=lambda entity: entity[1])
    ]
