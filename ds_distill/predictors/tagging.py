"""Find entities, or the answers to questions, with a token classifier, such as a run's student, in
texts of any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ds_distill.data.tokenizer import load_tokenizer, tokens_fingerprint
from ds_distill.data.word_windows import WordCutter, texts_of
from ds_distill.data.words import words_of
from ds_distill.errors import UserError
from ds_distill.evaluation.words import entities
from ds_distill.models.configuration import load_config, longest_input
from ds_distill.models.labels import class_names
from ds_distill.models.load import TAGGER, finite, load_model
from ds_distill.recipe.tags import OUTSIDE, SPAN_TAGS, are_entities


class Tagger:
    """A trained token classifier with its tokenizer."""

    def __init__(self, reference: str) -> None:
        """reference: a folder or hub id, resolved. It runs in fp32, on a GPU if there is one.

        Raises UserError when there is no token classifier.
        """
        config = load_config(reference)
        self.labels = class_names(config)
        self.answers_questions = self.labels == SPAN_TAGS
        """Whether it finds answers to questions in contexts; else entities in texts."""
        self.columns: tuple[tuple[str, ...], ...] = (("tokens",), ("text",))
        """Of a file's, those that are read where none are named: the first that are there."""
        if self.answers_questions:
            self.columns = (("question", "context"), ("text_a", "text_b"))
        self.tokenizer = load_tokenizer(reference, of_words=True)
        self.max_length = longest_input(config, self.tokenizer)
        """Tokens of a window; of a run's student those of its training."""
        self.cut = 0
        """Texts that were cut: none, they are read in windows."""
        self._model = load_model(TAGGER, reference, self.labels, new_head=False).eval()
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")

    def predictions(
        self, texts: Sequence[str | list[str] | tuple[str, str]], batch_size: int = 32
    ) -> list[dict[str, Any]]:
        """Of each text, list of words, or pair of a question and its context: `predicted`, what it
        found. Of a text entities: their `type`, `start` and `end` (characters, the end exclusive),
        `text`, and `probability`, the mean of their words' tags; where the model's tags are none of
        entities, each word with a tag other than O, its type. Of a question the answers: the same
        without a type. Of a list of words a tag for each; O of one without a token, None where
        there is no O.

        Raises UserError for a text where questions are answered, and for a pair where not."""
        questions = [text[0] if isinstance(text, tuple) else None for text in texts]
        contents = [text[1] if isinstance(text, tuple) else text for text in texts]
        if any((question is not None) != self.answers_questions for question in questions):
            raise UserError(
                "this model answers questions: give pairs of a question and its context."
                if self.answers_questions
                else "this model tags single texts: give no pairs."
            )
        spans = [None if isinstance(text, list) else words_of(text) for text in contents]
        words = [
            text if isinstance(text, list) else [text[start:end] for start, end in of_text or ()]
            for text, of_text in zip(contents, spans, strict=True)
        ]
        found = []
        tagged = self._tag(words, questions, batch_size)
        for text, of_text, (tags, shares) in zip(contents, spans, tagged, strict=True):
            predicted: list[Any] = list(tags)
            if of_text is not None:
                predicted = self._found(str(text), of_text, tags, shares)
            if self.answers_questions:
                predicted = [{k: v for k, v in one.items() if k != "type"} for one in predicted]
            found.append({"predicted": predicted})
        return found

    def _tag(
        self, texts: list[list[str]], questions: Sequence[str | None], batch_size: int
    ) -> list[tuple[list[str | None], np.ndarray]]:
        """Each text's tags, and their probabilities."""
        names = [*self.labels, OUTSIDE if OUTSIDE in self.labels else None]
        found = [np.full(len(words), len(self.labels)) for words in texts]
        shares = [np.ones(len(words)) for words in texts]
        windows = sorted(self._windows(texts, questions), key=lambda row: len(row["words"]))
        for start in range(0, len(windows), batch_size):
            some = windows[start : start + batch_size]
            for row, logits in zip(some, self._read(some), strict=True):
                own = slice(row["first"], row["first"] + len(row["words"]))
                here = row["owned"] & row["counted"]
                probabilities = logits.softmax(dim=1).numpy()
                found[row["number"]][own][here] = probabilities.argmax(axis=1)[here]
                shares[row["number"]][own][here] = probabilities.max(axis=1)[here]
        return [
            ([names[number] for number in numbers], of_text)
            for numbers, of_text in zip(found, shares, strict=True)
        ]

    def _found(
        self,
        text: str,
        spans: list[tuple[int, int]],
        tags: list[str | None],
        shares: np.ndarray,
    ) -> list[dict[str, Any]]:
        """Entities, or words with tags; see `predictions`."""
        known = [OUTSIDE if tag is None else tag for tag in tags]
        if are_entities(self.labels):
            [found] = entities([known], strict=False)
        else:
            found = {(tag, at, at) for at, tag in enumerate(known) if tag != OUTSIDE}
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

    @torch.no_grad()
    def _read(self, windows: list[dict[str, Any]]) -> Iterator[torch.Tensor]:
        """Of each window logits at its words' first tokens: float32 [words, C]."""
        names = ("input_ids", "token_type_ids")[: 1 + self.answers_questions]
        of = tokens_fingerprint(self.tokenizer)
        encoded = {name: [row[f"{of}:{name}"].tolist() for row in windows] for name in names}
        inputs = self.tokenizer.pad(encoded, return_tensors="pt").to(self._model.device)
        logits = finite(self._model, self._model(**inputs).logits.float().cpu())
        for number, row in enumerate(windows):
            first = np.maximum(row[f"{of}:first_tokens"], 0)
            yield logits[number][torch.from_numpy(first).long()]

    def _windows(
        self, texts: list[list[str]], questions: Sequence[str | None]
    ) -> Iterator[dict[str, Any]]:
        """Windows of at most `max_length` tokens that cover each text; see `WordCutter`."""
        cutter = WordCutter([self.tokenizer], self.max_length, pairs=self.answers_questions)
        numbers = [number for number, words in enumerate(texts) if words]
        asked = None
        if self.answers_questions:
            every = [str(questions[number]) for number in numbers]
            asked = [texts_of(question, words_of(question)) for question in every]
        return cutter.windows([texts[number] for number in numbers], numbers, asked)
