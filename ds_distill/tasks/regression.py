"""Regression: a row per example, whose one output is the number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ds_distill.data.batches import Examples
from ds_distill.evaluation.label_order import NumberDoubt
from ds_distill.evaluation.predictions import NumberPredictions
from ds_distill.models.labels import LabelMap
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.tasks import Regression
from ds_distill.tasks.data import TaskData
from ds_distill.tasks.kind import Codec
from ds_distill.tasks.sequence import SequenceKind

OUTPUT = ["LABEL_0"]
"""transformers' own name of the one output."""


class RegressionKind(SequenceKind[Regression]):
    """Predictions are numbers, float32 [N, 1]."""

    def load(
        self, data: TaskData, model: str, labels: list[str], **options: Any
    ) -> PreTrainedModel:
        """The bias of a new head is the mean of the labels in train, so that training starts at
        the baseline."""

        def mean() -> torch.Tensor:
            if not data.has_split("train") or not data.examples("train").labelled.any():
                return torch.zeros(1)
            found = data.examples("train")
            return torch.tensor([found.labels[found.labelled].mean()])

        return super().load(
            data, model, OUTPUT, problem_type="regression", output_bias=mean, **options
        )

    def examples(self, examples: Examples) -> Examples:
        """Labels float32 [N], also of a split that has none."""
        if examples.labels.dtype == np.float32:
            return examples
        return replace(examples, labels=np.full(len(examples), np.nan, dtype=np.float32))

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        return {"outputs": len(OUTPUT)}

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """The number as it is."""
        return {"classes": len(OUTPUT)}

    def scored(self, predictions: np.ndarray, examples: Examples) -> NumberPredictions:
        known = examples.labelled
        numbers = predictions[known, 0].astype(np.float64)
        return NumberPredictions(numbers, examples.labels[known].astype(np.float64))

    def baseline(
        self, data: TaskData, split: str, examples: Examples, references: list[ModelReference]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The mean of the training labels: no constant has a smaller squared error there. It has no
        correlation with anything."""
        source, labels = self.training_labels(data, examples)
        mean = labels.mean(dtype=np.float64)
        answer = {"answer": f"{mean:.4g}", "rule": "the mean label", "split": source}
        return np.full((len(examples), 1), mean), answer

    def label_doubt(
        self, predictions: np.ndarray, examples: Examples, classes: Sequence[int] | None = None
    ) -> NumberDoubt | None:
        scored = self.scored(predictions, examples)
        error = float(np.square(scored.predicted - scored.labels).mean())
        of_mean = float(scored.labels.var())
        return NumberDoubt(error, of_mean) if error > of_mean > 0 else None
