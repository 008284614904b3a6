"""Predict with a model, such as a run's student, for texts of a program; `file` reads those of a
file. Here is what labels texts; `tagging` finds entities or any number of spans, `answering` one
answer to a question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_distill.data.tokenizer import check_vocabulary, load_tokenizer
from ds_distill.errors import UserError
from ds_distill.models.configuration import load_config, longest_input
from ds_distill.models.labels import class_names
from ds_distill.models.load import CLASSIFIER, finite, load_model
from ds_distill.models.task_params import columns_of
from ds_distill.predictors.answering import Answerer
from ds_distill.predictors.tagging import Tagger
from ds_distill.recipe.references import resolve_model
from ds_distill.run.folder import student_folder

Text = str | tuple[str, str]
"""A text, or two."""

CHUNK = 4096
"""Texts that are sorted by length together."""


class Classifier:
    """A trained classifier, or regression model, with its tokenizer."""

    columns: tuple[tuple[str, ...], ...] = (("text",), ("text_a", "text_b"))
    """Of a file's, those that are read where none are named: the first that are there."""

    def __init__(self, reference: str) -> None:
        """reference: a folder or hub id, resolved. It runs in fp32, on a GPU if there is one.

        Raises UserError when there is no classifier.
        """
        config = load_config(reference)
        self.labels = class_names(config)
        self.many_labels = config.problem_type == "multi_label_classification"
        self.is_regression = config.problem_type == "regression" or len(self.labels) == 1
        """Whether it predicts a number; then there are no labels and no probabilities."""
        self.tokenizer = load_tokenizer(reference)
        self.max_length = longest_input(config, self.tokenizer)
        """Tokens; of a run's student those of its training. Longer texts are cut."""
        self.cut = 0
        """Texts, or pairs of them, that were longer, so far."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = (
            load_model(CLASSIFIER, reference, self.labels, new_head=False).eval().to(device)
        )

    @torch.no_grad()
    def _logits(self, texts: list[Text], batch_size: int) -> torch.Tensor:
        """float32 [N, outputs], in the order of the texts. Batches are of texts of like length."""
        if not texts:
            return torch.zeros(0, len(self.labels))
        firsts = [text if isinstance(text, str) else text[0] for text in texts]
        seconds = [text[1] for text in texts if not isinstance(text, str)]
        if seconds and len(seconds) < len(texts):
            raise UserError("some texts are pairs and others are not: give one kind at a time.")
        encoded = self.tokenizer(
            firsts, seconds or None, truncation=True, max_length=self.max_length
        )
        lengths = np.array([len(ids) for ids in encoded["input_ids"]])
        full = np.flatnonzero(lengths == self.max_length)
        self.cut += self._longer([firsts[i] for i in full], [seconds[i] for i in full if seconds])
        order = np.argsort(lengths, kind="stable")
        found = torch.empty(len(texts), len(self.labels))
        for start in range(0, len(order), batch_size):
            these = order[start : start + batch_size]
            batch = {
                name: [encoded[name][index] for index in these]
                for name in self.tokenizer.model_input_names
                if name in encoded
            }
            inputs = self.tokenizer.pad(batch, return_tensors="pt").to(self._model.device)
            found[torch.from_numpy(these)] = finite(
                self._model, self._model(**inputs).logits.float().cpu()
            )
        return found

    def _longer(self, firsts: list[str], seconds: list[str]) -> int:
        """How many texts, or pairs of them, are longer than `max_length`."""
        if not firsts:
            return 0
        whole = self.tokenizer(firsts, seconds or None, verbose=False)["input_ids"]
        return sum(len(ids) > self.max_length for ids in whole)

    def predictions(self, texts: list[Text], batch_size: int = 32) -> list[dict[str, Any]]:
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


Predictor = Classifier | Tagger | Answerer

_BY_HEAD: dict[str, type[Tagger] | type[Answerer]] = {
    "ForTokenClassification": Tagger,
    "ForQuestionAnswering": Answerer,
}


def load_predictor(model: str | Path) -> Predictor:
    """
    model: a folder as `save_pretrained` writes it, a run's folder (its student), or a hub id.

    Raises UserError when there is no model that predicts.
    """
    reference = resolve_model(str(student_folder(model) or model))
    config = load_config(reference)
    heads = [
        head
        for kind in getattr(config, "architectures", None) or []
        for head in _BY_HEAD
        if kind.endswith(head)
    ]
    predictor: Predictor = _BY_HEAD[heads[0]](reference) if heads else Classifier(reference)
    tokenizer = predictor.tokenizer
    check_vocabulary(reference, config, tokenizer)
    if tokenizer.pad_token_id is None:  # id 0 stands there in training, too
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    predictor.columns = (*columns_of(config), *predictor.columns)
    return predictor


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
        yield from predictor.predictions(chunk, batch_size)  # type: ignore[arg-type]
