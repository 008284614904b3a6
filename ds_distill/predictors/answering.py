"""Answer questions about texts of any length with a model for extractive QA, such as a run's
student."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import torch

from ds_distill.data.groups import MARKS
from ds_distill.data.question_windows import Windows, prepare
from ds_distill.data.tokenizer import load_tokenizer, tokens_fingerprint
from ds_distill.evaluation.answers import BEST, best_spans, ranked_answers
from ds_distill.keys import content_keys
from ds_distill.models.configuration import load_config, longest_input
from ds_distill.models.encoder import read_signals
from ds_distill.models.load import ANSWERER, finite, load_model
from ds_distill.models.task_params import count_of
from ds_distill.recipe.tasks import ExtractiveQA
from ds_distill.views import PaddedView

ANSWERS = 5
"""Answers to a question, as many as BioASQ takes."""

_LONGEST: int = ExtractiveQA.model_fields["max_answer_length"].default
"""Of a model that does not say how long its answers may be."""


class Answerer:
    """A trained model for extractive QA with its tokenizer."""

    columns: tuple[tuple[str, ...], ...] = (("question", "context"), ("text_a", "text_b"))
    """Of a file's, those that are read where none are named: the first that are there."""

    def __init__(self, reference: str) -> None:
        """reference: a folder or hub id, resolved. It runs in fp32, on a GPU if there is one.

        Raises UserError when there is no model for extractive QA.
        """
        config = load_config(reference)
        self.tokenizer = load_tokenizer(reference)
        self.max_length = longest_input(config, self.tokenizer)
        """Tokens of a window; of a run's student those of its training."""
        self.cut = 0
        """Texts that were cut: none, they are read in windows."""
        self.max_answer_length = count_of(config, "max_answer_len", _LONGEST)
        """Tokens of an answer at most; of a run's student as in its evaluation."""
        third = self.max_length // 3
        self.overlap = min(count_of(config, "doc_stride", third), third)
        """Tokens that windows share; of a run's student as in its evaluation, else a third."""
        self._model = load_model(ANSWERER, reference, new_head=False).eval()
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")

    def predictions(
        self, pairs: Sequence[tuple[str, str]], batch_size: int = 32
    ) -> list[dict[str, Any]]:
        """Of each question and its context `predicted`, the best answer, and `candidates`, the best
        five: `text`, `start` and `end` (characters of the context, the end exclusive) and `score`,
        the sum of the logits of start and end. Of a context without a token: "" and none."""
        if not pairs:
            return []
        windows = Windows.of(self._windows(pairs))
        spans = np.empty((len(windows.table), BEST, 3), dtype=np.float32)
        order = np.argsort(windows.first + windows.tokens, kind="stable")
        for start in range(0, len(order), batch_size):
            these = order[start : start + batch_size]
            spans[these] = self._read(windows.at(these))
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
            for answers in ranked_answers(spans, windows)
        ]

    def _windows(self, pairs: Sequence[tuple[str, str]]) -> datasets.Dataset:
        """See `prepare`."""
        questions, contexts = [list(texts) for texts in zip(*pairs, strict=True)]
        keys = content_keys(questions, contexts)
        columns = {
            "text": questions,
            "text_b": contexts,
            "answers": [None] * len(pairs),
            **dict.fromkeys(MARKS, keys[:, 0]),
        }
        examples = datasets.Dataset.from_dict(columns)
        return prepare(examples, self.tokenizer, self.max_length, self.overlap)

    @torch.no_grad()
    def _read(self, windows: Windows) -> np.ndarray:
        """The best spans of each window; see `best_spans`."""
        of = tokens_fingerprint(self.tokenizer)
        names = ("input_ids", "token_type_ids")
        rows = windows.table.select_columns([f"{of}:{name}" for name in names])[:]
        encoded = self.tokenizer.pad(
            {
                name: rows[f"{of}:{name}"]
                for name in names
                if name in self.tokenizer.model_input_names
            },
            return_tensors="pt",
        )
        view = PaddedView(
            encoded["input_ids"],
            encoded["attention_mask"],
            encoded.get("token_type_ids"),
            candidates=torch.from_numpy(windows.candidates),
        ).to(self._model.device)
        logits = finite(self._model, read_signals(self._model, view).logits)
        return best_spans(logits, self.max_answer_length).cpu().numpy()
