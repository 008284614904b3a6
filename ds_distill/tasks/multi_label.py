"""Multi-label classification: a row per example, a logit per label."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ds_distill.data.batches import Examples
from ds_distill.evaluation.predictions import LabelPredictions
from ds_distill.models.reference import ModelReference
from ds_distill.tasks.data import TaskData
from ds_distill.tasks.single_label import Classification


class MultiLabelKind(Classification):
    """Predictions are logits, float32 [N, L]; a label is predicted where its logit is above 0."""

    def load(
        self, data: TaskData, model: str, labels: list[str], **options: Any
    ) -> PreTrainedModel:
        """The bias of a new head is the log odds of each label in train. From zero all logits must
        fall first where most labels are rare, and encoder and pooler learn that in place of the
        text: no label of ten was predicted after 280 steps, with the log odds F1 was .31 after 89.
        """

        def log_odds() -> torch.Tensor:
            if not data.has_split("train"):
                return torch.zeros(len(labels))
            found = data.examples("train").labels
            there, known = (found == 1).sum(axis=0), (found >= 0).sum(axis=0)
            return torch.from_numpy((there + 0.5) / (known + 1)).logit().float()

        kind = "multi_label_classification"
        return super().load(data, model, labels, problem_type=kind, output_bias=log_odds, **options)

    def examples(self, examples: Examples) -> Examples:
        """Labels int64 [N, L], also of a split that has none."""
        if examples.labels.ndim > 1:
            return examples
        unknown = np.full((len(examples), len(self.labels)), -1, dtype=np.int64)
        return replace(examples, labels=unknown)

    def scored(self, predictions: np.ndarray, examples: Examples) -> LabelPredictions:
        known = examples.labelled
        return LabelPredictions(predictions[known], examples.labels[known])

    def baseline(
        self, data: TaskData, split: str, examples: Examples, references: list[ModelReference]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The labels that most training examples have, each as likely as it is frequent there; the
        most frequent one, where no label is that frequent: to predict none is right in no F1."""
        source, labels = self.training_labels(data, examples)
        shares = labels.mean(axis=0)
        shares[shares.argmax()] = max(shares.max(), 0.5 + 1e-6)
        with np.errstate(divide="ignore"):
            logits = np.log(shares) - np.log1p(-np.minimum(shares, 1 - 1e-9))
        answer = ", ".join(self.labels[index] for index in np.flatnonzero(logits > 0))
        return np.tile(logits, (len(examples), 1)), {
            "answer": answer,
            "rule": "the most frequent label",
            "split": source,
        }
