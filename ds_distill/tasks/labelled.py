"""Tasks whose examples, or words of these, have labels: predictions are logits of each row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from transformers import PreTrainedModel

from ds_distill.data.batches import RowsOf, Units, word_token_rows
from ds_distill.data.labels import is_labelled
from ds_distill.data.windows import word_windows
from ds_distill.engine.predict import ModelRunner, predict_all
from ds_distill.evaluation.label_order import LabelDoubt, NumberDoubt, label_doubt
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    TagPredictions,
    class_log_shares,
    span_columns,
    word_predictions,
)
from ds_distill.models.labels import LabelMap
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.tags import IN_SPAN
from ds_distill.recipe.tasks import TokenClassification
from ds_distill.tasks.kind import Codec, PredictInputs, TaskData, TaskKind, Tokenizers, Vocabulary
from ds_distill.types import LACKING


class LabelledKind(TaskKind[Any, np.ndarray]):
    """Predictions are logits, float32 [R, C]: of classes or labels, or the one output."""

    rule: str
    """By which the baseline answers, in words."""

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        if label_map is None:
            return {"labels": self.labels}
        return {"labels": {"labels": self.labels, "outputs": label_map.to_json()}}

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """As they are."""
        known = None if label_map is None else label_map.classes
        return {"classes": len(self.labels if known is None else known), "known": known}

    def predict(self, runner: ModelRunner, inputs: PredictInputs) -> dict[str, np.ndarray]:
        how = inputs.models, inputs.batch_size, inputs.bar
        outputs = predict_all(runner, inputs.collate, inputs.examples, *how)
        count = len(self.labels)
        return {model: signals.over_all(count).numpy() for model, signals in outputs.items()}

    def finite(self, predictions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.isfinite(predictions).all(axis=1))

    def baseline(
        self, data: TaskData, split: str, examples: Units, references: list[ModelReference]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The constant answer to the labels of train, or where it has none of the evaluated
        examples: no constant is right more often."""
        source, labels = "train", self.training_labels(data)
        if not len(labels):
            source, labels = "the evaluated split", _known_labels(examples)
        logits, answer = self.constant(labels)
        described = {"answer": answer, "rule": self.rule, "split": source}
        return np.tile(logits, (len(examples.labels), 1)), described

    @staticmethod
    def training_labels(data: TaskData) -> np.ndarray:
        """Those of train that are known, each once; none where it is not there."""
        return _known_labels(data.examples("train")) if data.has_split("train") else np.zeros(0)

    @abstractmethod
    def constant(self, labels: np.ndarray) -> tuple[np.ndarray, str]:
        """What is right of labels, all of them known, without reading a text, as logits, float64
        [C], and in words."""


def _known_labels(examples: Units) -> np.ndarray:
    """Of words that are in several windows one."""
    labels = examples.labels[examples.whole()[0]]
    return labels[is_labelled(labels)]


# ------------------------------------------------------------------------------------ one label


class OneLabelKind(LabelledKind):
    """Each row has one label."""

    rule = "the most frequent class"

    def constant(self, labels: np.ndarray) -> tuple[np.ndarray, str]:
        """Each class as likely as it is frequent."""
        shares = class_log_shares(labels, len(self.labels))
        return shares, self.labels[int(shares.argmax())]

    def label_doubt(
        self, predictions: np.ndarray, examples: Units, classes: Sequence[int] | None = None
    ) -> LabelDoubt | None:
        labels, known = examples.counted_labels, list(classes or range(len(self.labels)))
        column_of = np.full(len(self.labels) + 1, -1)  # the last is of unlabelled examples
        column_of[known] = np.arange(len(known))
        names = [self.labels[number] for number in known]
        found = label_doubt(predictions[:, known], column_of[labels], names)
        of_some_tags = classes and self.settings.of_words
        if found is None or self.metric.name == Accuracy.name or of_some_tags:
            return found
        # By the task's metric, too: on the examples of these classes, among which it chooses.
        own = np.where(np.isin(labels, known), labels, -1)
        judged = replace(examples, labels=own) if classes else examples
        among = np.full_like(predictions, LACKING)
        among[:, known] = predictions[:, known]
        constant = np.tile(self.constant(own)[0], (len(predictions), 1))
        value, of_constant = (
            self.metric.value(self.scored(each, judged)) for each in (among, constant)
        )
        better = self.metric.is_better(value, of_constant)
        found = replace(found, scores=(value, of_constant), is_better=better)
        return found if found.is_doubtful else None


class SingleLabelKind(OneLabelKind):
    """Each example has one label."""

    def scored(self, predictions: np.ndarray, examples: Units) -> ClassPredictions:
        return ClassPredictions.labelled(predictions, examples.labels)


# -------------------------------------------------------------- any number of labels, numbers


class MultiLabelKind(LabelledKind):
    """Predictions are logits, float32 [N, L]; a label is predicted where its logit is above 0."""

    rule = "the most frequent label"

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

    def examples(self, examples: Units) -> Units:
        """Labels int64 [N, L], also of a split that has none."""
        if examples.labels.ndim > 1:
            return examples
        unknown = np.full((len(examples), len(self.labels)), -1, dtype=np.int64)
        return replace(examples, labels=unknown)

    def scored(self, predictions: np.ndarray, examples: Units) -> LabelPredictions:
        known = examples.labelled
        return LabelPredictions(predictions[known], examples.labels[known])

    def constant(self, labels: np.ndarray) -> tuple[np.ndarray, str]:
        """The labels that most examples have, each as likely as it is frequent; the most frequent
        one, where no label is that frequent: to predict none is right in no F1."""
        shares = labels.mean(axis=0)
        shares[shares.argmax()] = max(shares.max(), 0.5 + 1e-6)
        with np.errstate(divide="ignore"):
            logits = np.log(shares) - np.log1p(-np.minimum(shares, 1 - 1e-9))
        return logits, ", ".join(self.labels[index] for index in np.flatnonzero(logits > 0))


OUTPUT = ["LABEL_0"]
"""transformers' own name of the one output."""


class RegressionKind(LabelledKind):
    """Predictions are numbers, float32 [N, 1]."""

    rule = "the mean label"

    def load(
        self, data: TaskData, model: str, labels: list[str], **options: Any
    ) -> PreTrainedModel:
        """The bias of a new head is the mean of the labels in train, so that training starts at
        the baseline."""

        def mean() -> torch.Tensor:
            known = self.training_labels(data)
            return torch.tensor([known.mean() if len(known) else 0.0], dtype=torch.float32)

        return super().load(
            data, model, OUTPUT, problem_type="regression", output_bias=mean, **options
        )

    def examples(self, examples: Units) -> Units:
        """Labels float32 [N], also of a split that has none."""
        if examples.labels.dtype == np.float32:
            return examples
        return replace(examples, labels=np.full(len(examples), np.nan, dtype=np.float32))

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        return {"outputs": len(OUTPUT)}

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """The number as it is."""
        return {"classes": len(OUTPUT)}

    def scored(self, predictions: np.ndarray, examples: Units) -> NumberPredictions:
        known = examples.labelled
        numbers = predictions[known, 0].astype(np.float64)
        return NumberPredictions(numbers, examples.labels[known].astype(np.float64))

    def constant(self, labels: np.ndarray) -> tuple[np.ndarray, str]:
        """The mean: no constant has a smaller squared error."""
        mean = labels.mean(dtype=np.float64)
        return np.array([mean]), f"{mean:.4g}"

    def label_doubt(
        self, predictions: np.ndarray, examples: Units, classes: Sequence[int] | None = None
    ) -> NumberDoubt | None:
        scored = self.scored(predictions, examples)
        error = float(np.square(scored.predicted - scored.labels).mean())
        of_mean = float(scored.labels.var())
        return NumberDoubt(error, of_mean) if error > of_mean > 0 else None


# ------------------------------------------------------------------------------- a label per word


class TokenClassificationKind(OneLabelKind):
    """Predictions are logits of all words, float32 [R, C]."""

    rule = "the most frequent tag"

    def prepare(
        self, examples: datasets.Dataset, tokenizers: Tokenizers, file: Path
    ) -> datasets.Dataset:
        return word_windows(examples, tokenizers(), self.settings.max_length, file)

    def label_rows(self, vocabulary: Vocabulary) -> RowsOf:
        every = isinstance(self.settings, TokenClassification) and self.settings.subwords == "all"
        return word_token_rows if every else super().label_rows(vocabulary)

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """A list of rows for each example, one for each word."""
        return {**super().stored(vocabulary, codec, label_map), "mask_variants": 1}

    def scored_words(self, examples: Units) -> str | None:
        """A hash of which words are scored as a model predicts them, where some count as O: other
        models of a recipe, or another length, leave out others."""
        counted = examples.counted[examples.whole()[0]]
        return None if counted.all() else xxhash.xxh3_128_hexdigest(counted.tobytes())

    def scored(self, predictions: np.ndarray, examples: Units) -> TagPredictions:
        known, rows = examples.where(examples.labelled)
        return word_predictions(predictions[rows], known, self.labels)


class CharacterSpansKind(TokenClassificationKind):
    """Predictions are logits of all words of all windows of contexts, float32 [R, 2]."""

    def scored_words(self, examples: Units) -> str | None:
        """A hash of the answers in all windows, and of where the words stand."""
        arrays = (*span_columns(examples), examples.counted[examples.whole()[0]])
        return xxhash.xxh3_128_hexdigest(b"".join(of.tobytes() for of in arrays))

    def baseline(
        self, data: TaskData, split: str, examples: Units, references: list[ModelReference]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Every word of every context: of what can be said without reading it nothing has a better
        F1, and of the most frequent tag, which finds no span, it is 0."""
        inside = np.zeros((len(examples.labels), len(self.labels)), dtype=np.float32)
        inside[:, self.labels.index(IN_SPAN)] = 1.0
        return inside, {"answer": IN_SPAN, "rule": "the whole context", "split": split}

    def label_doubt(
        self, predictions: np.ndarray, examples: Units, classes: Sequence[int] | None = None
    ) -> LabelDoubt | None:
        """None: nearly all words are outside, so a model that finds many answers may be right on
        fewer words than one that finds none."""
        return None
