"""Classification: a row per example; with one label, logits over the classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ds_distill.data.batches import Examples
from ds_distill.evaluation.baseline import class_log_shares
from ds_distill.evaluation.label_order import LabelDoubt, label_doubt
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.models.labels import LabelMap
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.tasks import LabelledTask
from ds_distill.tasks.data import TaskData
from ds_distill.tasks.kind import Codec
from ds_distill.tasks.sequence import SequenceKind
from ds_distill.types import LACKING


class Classification(SequenceKind[LabelledTask]):
    """What the kinds of classification share. Predictions are logits, float32 [R, C]."""

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        if label_map is None:
            return {"labels": self.labels}
        return {"labels": {"labels": self.labels, "outputs": label_map.to_json()}}

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """As they are."""
        known = None if label_map is None else label_map.classes
        return {"classes": len(self.labels if known is None else known), "known": known}


class OneLabelKind(Classification):
    """Each row has one label."""

    baseline_rule = "the most frequent class"

    def baseline(
        self, data: TaskData, split: str, examples: Examples, references: list[ModelReference]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The commonest class of the training labels, each class as likely as it is frequent
        there."""
        source, labels = self.training_labels(data, examples)
        shares = class_log_shares(labels, len(self.labels))
        answer = self.labels[int(shares.argmax())]
        described = {"answer": answer, "rule": self.baseline_rule, "split": source}
        return np.tile(shares, (len(examples.labels), 1)), described

    def label_doubt(
        self, predictions: np.ndarray, examples: Examples, classes: Sequence[int] | None = None
    ) -> LabelDoubt | None:
        labels, known = examples.counted_labels, list(classes or range(len(self.labels)))
        column_of = np.full(len(self.labels) + 1, -1)  # the last is of unlabelled examples
        column_of[known] = np.arange(len(known))
        names = [self.labels[number] for number in known]
        found = label_doubt(predictions[:, known], column_of[labels], names)
        if (
            found is None
            or self.metric.name == Accuracy.name
            or (classes and examples.words is not None)
        ):
            return found
        # By the task's metric, too: on the examples of these classes, among which it chooses.
        own = np.where(np.isin(labels, known), labels, -1)
        judged = examples if examples.words is not None else replace(examples, labels=own)
        among = np.full_like(predictions, LACKING)
        among[:, known] = predictions[:, known]
        shares = class_log_shares(own[own >= 0], len(self.labels))
        constant = np.tile(shares, (len(predictions), 1))
        value, of_constant = (
            self.metric.value(self.scored(each, judged)) for each in (among, constant)
        )
        better = self.metric.is_better(value, of_constant)
        found = replace(found, scores=(value, of_constant), is_better=better)
        return found if found.is_doubtful else None


class SingleLabelKind(OneLabelKind):
    """Each example has one label."""

    def scored(self, predictions: np.ndarray, examples: Examples) -> ClassPredictions:
        return ClassPredictions.labelled(predictions, examples.labels)
