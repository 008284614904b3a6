"""Extractive QA: of each window of a context two rows, logits over its tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from ds_distill.data.batches import Units
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
from ds_distill.tasks.kind import Codec, PredictInputs, TaskData, TaskKind, Tokenizers


class ExtractiveQAKind(TaskKind[ExtractiveQA, Answers]):
    """Predictions are the best answers to each question: logits of all windows have unlike
    lengths."""

    def prepare(
        self, examples: datasets.Dataset, tokenizers: Tokenizers, file: Path
    ) -> datasets.Dataset:
        settings = self.settings
        tokenizer = tokenizers()[0]  # all have the same tokens
        return question_windows(examples, tokenizer, settings.max_length, settings.overlap, file)

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        return {}

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """Two rows of each window; windows have unlike numbers of tokens."""
        return {"classes": self.settings.max_length, "ragged": True, "mask_variants": 1}

    def predict(self, runner: ModelRunner, inputs: PredictInputs) -> dict[str, Answers]:
        def best(logits: torch.Tensor) -> torch.Tensor:
            return best_spans(logits, self.settings.max_answer_length)

        how = inputs.models, inputs.batch_size
        found = best_of_each(runner, inputs.collate, *how, best, inputs.bar)
        return {
            model: Answers(
                ranked_answers(spans.numpy(), inputs.examples),
                np.isfinite(spans.numpy()).all(axis=(1, 2)),
            )
            for model, spans in found.items()
        }

    def finite(self, predictions: Answers) -> torch.Tensor:
        return torch.from_numpy(predictions.finite).repeat_interleave(2)

    def labels_of(self, examples: Units) -> np.ndarray:
        """Of each the start and the end: int64 [N, 2]."""
        return examples.labels.reshape(-1, 2)

    def scored(self, predictions: Answers, examples: Units) -> AnswerPredictions:
        firsts = np.flatnonzero(examples.is_first)
        known = examples.labelled[firsts]
        ranked = [
            [answer.text for answer in answers]
            for answers, has in zip(predictions.ranked, known, strict=True)
            if has
        ]
        right = examples.at(firsts[known]).stored()["answers"][:]
        return AnswerPredictions(ranked, right, int(examples.labelled.sum()))

    def baseline(
        self, data: TaskData, split: str, examples: Units, references: list[ModelReference]
    ) -> tuple[Answers, dict[str, Any]]:
        """The most frequent right answer of train, whatever is asked; of equals the first."""
        source, known = "the evaluated split", examples
        if data.has_split("train") and (train := data.examples("train")).labelled.any():
            source, known = "train", train
        of_each = known.where(known.is_first)[0].stored()["answers"][:]
        [(answer, _)] = Counter(texts[0] for texts in of_each if texts).most_common(1)
        constant = [[Answer(answer, 0, 0.0)] for _ in range(examples.is_first.sum())]
        finite = np.ones(len(examples), dtype=bool)
        described = {"answer": answer, "rule": "the most frequent answer", "split": source}
        return Answers(constant, finite), described
