"""Predict with a model, such as a run's student, for texts of a program; `file` reads those of a
file. A classifier labels texts, a tagger finds entities or any number of spans, an answerer one
answer to a question.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedConfig

from ds_distill.data.batches import Units
from ds_distill.data.spans import texts_of, words_of
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import check_vocabulary, load_tokenizer
from ds_distill.data.windows import question_windows, word_windows
from ds_distill.errors import UserError
from ds_distill.evaluation.answers import BEST, best_spans, ranked_answers
from ds_distill.evaluation.predictions import entities
from ds_distill.models.configuration import load_config, longest_input
from ds_distill.models.encoder import read_signals
from ds_distill.models.labels import class_names
from ds_distill.models.load import ANSWERER, CLASSIFIER, TAGGER, finite, load_model
from ds_distill.models.task_params import columns_of, count_of
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tags import OUTSIDE, SPAN_TAGS, are_entities
from ds_distill.recipe.tasks import ExtractiveQA
from ds_distill.run.folder import student_folder
from ds_distill.views import PaddedView

Text = str | tuple[str, str]
"""A text, or two."""

CHUNK = 4096
"""Texts that are sorted by length together."""

ANSWERS = 5
"""Answers to a question, as many as BioASQ takes."""

_LONGEST: int = ExtractiveQA.model_fields["max_answer_length"].default
"""Of a model that does not say how long its answers may be."""

ONE_TEXT = (("text",), ("text_a", "text_b"))
ASKED = (("question", "context"), ("text_a", "text_b"))


class Predictor(ABC):
    """A trained model with its tokenizer."""

    head = CLASSIFIER
    """The ending of transformers' class that it is of."""
    of_words = False
    """Whether it reads lists of words."""
    columns: tuple[tuple[str, ...], ...] = ONE_TEXT
    """Of a file's, those that are read where none are named: the first that are there."""

    def __init__(self, reference: str, config: PreTrainedConfig) -> None:
        """reference: a folder or hub id, resolved. It runs in fp32, on a GPU if there is one.

        Raises UserError where the model has no such head.
        """
        self.labels = class_names(config) if self.head != ANSWERER else []
        self.tokenizer = load_tokenizer(reference, of_words=self.of_words)
        self.max_length = longest_input(config, self.tokenizer)
        """Tokens of a text, or of a window; of a run's student those of its training."""
        self.cut = 0
        """Texts, or pairs of them, that were cut at so many tokens, so far."""
        model = load_model(self.head, reference, self.labels or None, new_head=False).eval()
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        check_vocabulary(reference, config, self.tokenizer)
        self.columns = (*columns_of(config), *self.columns)

    @abstractmethod
    def predictions(self, texts: Sequence[Any], batch_size: int = 32) -> list[dict[str, Any]]:
        """Of each text `predicted`, and more."""

    def _batches(
        self, table: TokenTable, batch_size: int
    ) -> Iterator[tuple[np.ndarray, PaddedView]]:
        """Batches of units of like length: their numbers, and what the model reads."""
        order = np.argsort(table.lengths, kind="stable")
        for start in range(0, len(order), batch_size):
            these = order[start : start + batch_size]
            yield these, table.view(these).to(self._model.device)


class Classifier(Predictor):
    """A classifier, or a regression model. Longer texts are cut."""

    def __init__(self, reference: str, config: PreTrainedConfig) -> None:
        super().__init__(reference, config)
        self.many_labels = config.problem_type == "multi_label_classification"
        self.is_regression = config.problem_type == "regression" or len(self.labels) == 1
        """Whether it predicts a number; then there are no labels and no probabilities."""

    @torch.no_grad()
    def _logits(self, texts: Sequence[Text], batch_size: int) -> torch.Tensor:
        """float32 [N, outputs], in the order of the texts."""
        found = torch.empty(len(texts), len(self.labels))
        if not texts:
            return found
        firsts = [text if isinstance(text, str) else text[0] for text in texts]
        seconds = [text[1] for text in texts if not isinstance(text, str)]
        if seconds and len(seconds) < len(texts):
            raise UserError("some texts are pairs and others are not: give one kind at a time.")
        examples = datasets.Dataset.from_dict(
            {"text": firsts, **({"text_b": seconds} if seconds else {})}
        )
        tokens = tokenise(examples, self.tokenizer, self.max_length)
        table = TokenTable(tokens, self.tokenizer)
        full = np.flatnonzero(table.lengths == self.max_length)
        self.cut += self._longer(
            [firsts[at] for at in full], [seconds[at] for at in full if seconds]
        )
        for these, view in self._batches(table, batch_size):
            logits = self._model(**view.model_inputs()).logits.float().cpu()
            found[torch.from_numpy(these)] = finite(self._model, logits)
        return found

    def _longer(self, firsts: list[str], seconds: list[str]) -> int:
        """How many texts, or pairs of them, are longer than `max_length`."""
        if not firsts:
            return 0
        whole = self.tokenizer(firsts, seconds or None, verbose=False)["input_ids"]
        return sum(len(ids) > self.max_length for ids in whole)

    def predictions(self, texts: Sequence[Text], batch_size: int = 32) -> list[dict[str, Any]]:
        """Of each text `predicted`: a label, or the list of those above a half where a text may
        have any number, or of a regression model the number; and of labels `probabilities` by
        label: they sum to 1, or with any number of labels per text each is that of the label's
        presence."""
        logits = self._logits(texts, batch_size)
        if self.is_regression:
            return [{"predicted": float(number)} for number in logits[:, 0]]
        shares = logits.sigmoid() if self.many_labels else logits.softmax(dim=1)
        return [self._prediction(row) for row in shares.numpy()]

    def _prediction(self, shares: np.ndarray) -> dict[str, Any]:
        named = {name: float(share) for name, share in zip(self.labels, shares, strict=True)}
        predicted: Any = self.labels[int(shares.argmax())]
        if self.many_labels:
            predicted = [name for name, share in named.items() if share > 0.5]
        return {"predicted": predicted, "probabilities": named}


class Tagger(Predictor):
    """A token classifier, which reads long texts in windows."""

    head, of_words = TAGGER, True

    def __init__(self, reference: str, config: PreTrainedConfig) -> None:
        self.answers_questions = class_names(config) == SPAN_TAGS
        """Whether it finds answers to questions in contexts; else entities in texts."""
        self.columns = ASKED if self.answers_questions else (("tokens",), ("text",))
        super().__init__(reference, config)

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
        if not texts:
            return []
        spans = [[] if isinstance(text, list) else words_of(text) for text in contents]
        columns: dict[str, list[Any]] = {"text": questions, "text_b": contents}
        columns["answers"] = [None] * len(texts)
        if not self.answers_questions:
            words = [
                text if isinstance(text, list) else texts_of(text, of_text)
                for text, of_text in zip(contents, spans, strict=True)
            ]
            columns = {"words": words, "label": [[-1] * len(of_text) for of_text in words]}
        found = []
        tagged = self._tag(datasets.Dataset.from_dict(columns), batch_size)
        for text, of_text, (tags, shares) in zip(contents, spans, tagged, strict=True):
            predicted: list[Any] = tags
            if isinstance(text, str):
                predicted = self._found(text, of_text, tags, shares)
            if self.answers_questions:
                predicted = [{k: v for k, v in one.items() if k != "type"} for one in predicted]
            found.append({"predicted": predicted})
        return found

    @torch.no_grad()
    def _tag(
        self, examples: datasets.Dataset, batch_size: int
    ) -> Iterator[tuple[list[str | None], np.ndarray]]:
        """Each example's tags, and their probabilities; see `word_windows`."""
        split = word_windows(examples, [self.tokenizer], self.max_length)
        units, table = Units.of(split), TokenTable(split, self.tokenizer)
        found = torch.empty(len(units.labels), len(self.labels))
        for these, view in self._batches(table, batch_size):
            logits = finite(self._model, self._model(**view.model_inputs()).logits.float().cpu())
            assert view.positions is not None
            of_these = torch.from_numpy(units.rows_of(these))
            found[of_these] = logits.flatten(0, 1)[view.positions.cpu()]
        shares, numbers = (each.numpy() for each in found.softmax(dim=1).max(dim=1))
        names = np.array([*self.labels, OUTSIDE if OUTSIDE in self.labels else None], dtype=object)
        tags = names[np.where(units.counted, numbers, -1)]
        rows, offsets = units.whole()
        shares = np.where(units.counted, shares.astype(np.float64), 1.0)
        for own in np.split(rows, offsets[1:-1]):
            yield tags[own].tolist(), shares[own]

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


class Answerer(Predictor):
    """A model for extractive QA, which reads long contexts in windows."""

    head, columns = ANSWERER, ASKED

    def __init__(self, reference: str, config: PreTrainedConfig) -> None:
        super().__init__(reference, config)
        self.max_answer_length = count_of(config, "max_answer_len", _LONGEST)
        """Tokens of an answer at most; of a run's student as in its evaluation."""
        third = self.max_length // 3
        self.overlap = min(count_of(config, "doc_stride", third), third)
        """Tokens that windows share; of a run's student as in its evaluation, else a third."""

    @torch.no_grad()
    def predictions(
        self, texts: Sequence[tuple[str, str]], batch_size: int = 32
    ) -> list[dict[str, Any]]:
        """Of each question and its context `predicted`, the best answer, and `candidates`, the best
        five: `text`, `start` and `end` (characters of the context, the end exclusive) and `score`,
        the sum of the logits of start and end. Of a context without a token: "" and none."""
        if not texts:
            return []
        split = self._windows(texts)
        units, table = Units.of(split), TokenTable(split, self.tokenizer)
        spans = np.empty((len(units), BEST, 3), dtype=np.float32)
        for these, view in self._batches(table, batch_size):
            logits = finite(self._model, read_signals(self._model, view).logits)
            spans[these] = best_spans(logits, self.max_answer_length).cpu().numpy()
        return [
            {
                "predicted": answers[0].text if answers else "",
                "candidates": [
                    {
                        "text": answer.text,
                        "start": answer.start,
                        "end": answer.start + len(answer.text),
                        "score": answer.score,
                    }
                    for answer in answers[:ANSWERS]
                ],
            }
            for answers in ranked_answers(spans, units)
        ]

    def _windows(self, pairs: Sequence[tuple[str, str]]) -> datasets.Dataset:
        """See `question_windows`."""
        questions, contexts = map(list, zip(*pairs, strict=True))
        columns = {"text": questions, "text_b": contexts, "answers": [None] * len(pairs)}
        examples = datasets.Dataset.from_dict(columns)
        return question_windows(examples, self.tokenizer, self.max_length, self.overlap)


def load_predictor(model: str | Path) -> Predictor:
    """
    model: a folder as `save_pretrained` writes it, a run's folder (its student), or a hub id.

    Raises UserError when there is no model that predicts.
    """
    reference = resolve_model(str(student_folder(model) or model))
    config = load_config(reference)
    for kind in getattr(config, "architectures", None) or []:
        for one in (Tagger, Answerer):
            if kind.endswith(one.head):
                return one(reference, config)
    return Classifier(reference, config)


def predict(
    model: str | Path, texts: Iterable[Text | list[str]], *, batch_size: int = 32
) -> Iterator[dict[str, Any]]:
    """Predictions of a model for texts, in their order; see `Classifier.predictions` of a
    classifier or regression model, `Tagger.predictions` of a token classifier, and
    `Answerer.predictions` of a model for extractive QA.

        for found in predict("runs/quickstart", ["Compute the eigenvalues of a matrix."]):
            print(found["predicted"], found["probabilities"])

    model: as `load_predictor` takes it. texts: each a string, or a pair of two; for a token
        classifier a string of any length, or a list of words; for extractive QA and
        character spans pairs of a question and its context, of any length.

    Raises UserError when there is no model that predicts.
    """
    predictor, given = load_predictor(model), iter(texts)
    while chunk := list(islice(given, CHUNK)):
        yield from predictor.predictions(chunk, batch_size)
