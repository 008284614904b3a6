"""Extractive QA: of each window of a context two rows, logits over its tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from ds_distill.data.batches import Examples, RowsOf, span_rows
from ds_distill.data.windows import question_windows
from ds_distill.engine.predict import ModelRunner, best_of_each
from ds_distill.evaluation.answers import (
    Answer,
    AnswerPredictions,
    Answers,
    best_spans,
    ranked_answers,
)
from ds_distill.models.labels import LabelMap
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.tasks import ExtractiveQA
from ds_distill.tasks.data import TaskData, Tokenizers
from ds_distill.tasks.kind import Codec, PredictInputs, TaskKind, Vocabulary


class ExtractiveQAKind(TaskKind[ExtractiveQA, Answers]):
    """Predictions are the best answers to each question: logits of all windows have unlike
    lengths."""

    def prepare(
        self, examples: datasets.Dataset, tokenizers: Tokenizers, file: Path
    ) -> datasets.Dataset:
        settings = self.settings
        tokenizer = tokenizers()[0]  # all have the same tokens
        return question_windows(examples, tokenizer, settings.max_length, settings.overlap, file)

    def rows(self, vocabulary: Vocabulary, every_token: bool) -> RowsOf:
        return span_rows

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        return {}

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """Two rows of each window; windows have unlike numbers of tokens."""
        return {"classes": self.settings.max_length, "ragged": True, "mask_variants": 1}

    def predict(self, runner: ModelRunner, inputs: PredictInputs) -> dict[str, Answers]:
        def best(logits: torch.Tensor) -> torch.Tensor:
            return best_spans(logits, self.settings.max_answer_length)

        windows = inputs.examples.windows
        assert windows is not None
        how = inputs.models, inputs.batch_size
        found = best_of_each(runner, inputs.collate, *how, best, inputs.bar)
        return {
            model: Answers(
                ranked_answers(spans.numpy(), windows),
                np.isfinite(spans.numpy()).all(axis=(1, 2)),
            )
            for model, spans in found.items()
        }

    def finite(self, predictions: Answers) -> torch.Tensor:
        return torch.from_numpy(predictions.finite)

    def scored(self, predictions: Answers, examples: Examples) -> AnswerPredictions:
        assert examples.windows is not None
        firsts = examples.windows.firsts
        known = examples.labelled[firsts]
        ranked = [
            [answer.text for answer in answers]
            for answers, has in zip(predictions.ranked, known, strict=True)
            if has
        ]
        right = examples.windows.table.select(firsts[known])["answers"][:]
        return AnswerPredictions(ranked, right, int(examples.labelled.sum()))

    def baseline(
        self, data: TaskData, split: str, examples: Examples, references: list[ModelReference]
    ) -> tuple[Answers, dict[str, Any]]:
        """The most frequent right answer of train, whatever is asked; of equals the first."""
        source, known = "the evaluated split", examples
        if data.has_split("train") and (train := data.examples("train")).labelled.any():
            source, known = "train", train
        assert examples.windows is not None and known.windows is not None
        of_each = known.windows.table.select(known.windows.firsts)["answers"][:]
        [(answer, _)] = Counter(texts[0] for texts in of_each if texts).most_common(1)
        constant = [[Answer(answer, 0, 0.0)] for _ in examples.windows.firsts]
        finite = np.ones(len(examples), dtype=bool)
        described = {"answer": answer, "rule": "the most frequent answer", "split": source}
        return Answers(constant, finite), described
