"""Classification: a row per example; with one label, logits over the classes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_distill.cache.schema import SignalSchema
from ds_distill.data.batches import CachedSignals, Collator, Examples, SequenceCollator
from ds_distill.data.labels import is_labelled
from ds_distill.data.tokenise import TokenTable
from ds_distill.engine.engine import Engine
from ds_distill.engine.predict import Bar, predict_all
from ds_distill.evaluation.baseline import class_log_shares
from ds_distill.evaluation.label_order import Doubt, doubt
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.evaluation.report import classification_report
from ds_distill.models.labels import LabelMap
from ds_distill.models.load import load_classifier
from ds_distill.parts.phases import Cache
from ds_distill.parts.tasks.labelled import LabelledTask
from ds_distill.tasks.kind import TaskKind

if TYPE_CHECKING:
    from ds_distill.run.context import ModelReference, Run


class Classification(TaskKind[LabelledTask, np.ndarray]):
    """What the kinds of classification share. Predictions are logits, float32 [R, C]."""

    problem_type: str | None = None
    """transformers' name of the head's loss, for the configuration of trained models."""

    def load(self, run: Run, model: str, labels: list[str], **options: Any) -> PreTrainedModel:
        return load_classifier(model, labels, problem_type=self.problem_type, **options)

    def collator(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        cached: CachedSignals | None,
        packed: Collection[str],
    ) -> Collator:
        return SequenceCollator(examples, tables, cached, packed)

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        if label_map is None:
            return {"labels": self.labels}
        return {"labels": {"labels": self.labels, "outputs": label_map.to_json()}}

    def signal_schema(
        self,
        phase: Cache,
        config: PreTrainedConfig,
        codec: Callable[[int], dict[str, Any] | None],
        label_map: LabelMap | None,
    ) -> SignalSchema:
        """Class logits are stored as they are."""
        hidden = dict.fromkeys(phase.hidden, config.hidden_size)
        known = None if label_map is None else label_map.classes
        classes = len(self.labels if known is None else known)
        return SignalSchema(dtype=phase.dtype, classes=classes, known=known, hidden=hidden)

    def predict(
        self,
        engine: Engine,
        collate: Collator,
        examples: Examples,
        models: Sequence[str],
        batch_size: int,
        bar: AbstractContextManager[Bar] | None = None,
    ) -> dict[str, np.ndarray]:
        outputs = predict_all(engine, collate, examples, models, batch_size, bar)
        count = len(self.labels)
        return {model: signals.over_all(count).numpy() for model, signals in outputs.items()}

    def finite(self, predictions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.isfinite(predictions).all(axis=1))

    def counted(self, examples: Examples) -> np.ndarray:
        return examples.labelled

    def training_labels(self, run: Run, examples: Examples) -> tuple[str, np.ndarray]:
        """The labels of train, and its name; where it has none, those of the evaluated examples: no
        constant answer is right more often."""
        if run.has_split("train"):
            labels = run.examples("train").labels
            if is_labelled(labels).any():
                return "train", labels[is_labelled(labels)]
        return "the evaluated split", examples.labels[is_labelled(examples.labels)]


class OneLabelKind(Classification):
    """Each row has one label."""

    def baseline(
        self, run: Run, split: str, examples: Examples, references: list[ModelReference]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The commonest class of the training labels, each class as likely as it is frequent
        there."""
        source, labels = self.training_labels(run, examples)
        shares = class_log_shares(labels, len(self.labels))
        answer = self.labels[int(shares.argmax())]
        return np.tile(shares, (len(examples.labels), 1)), {"answer": answer, "split": source}

    def doubt(
        self, predictions: np.ndarray, examples: Examples, classes: Sequence[int] | None = None
    ) -> Doubt | None:
        if classes is None:
            return doubt(predictions, examples.counted_labels, self.labels)
        known = list(classes)
        column_of = np.full(len(self.labels) + 1, -1)  # the last is of unlabelled examples
        column_of[known] = np.arange(len(known))
        names = [self.labels[number] for number in known]
        return doubt(predictions[:, known], column_of[examples.counted_labels], names)


class SingleLabelKind(OneLabelKind):
    """Each example has one label."""

    def scored(self, predictions: np.ndarray, examples: Examples) -> ClassPredictions:
        return ClassPredictions.labelled(predictions, examples.labels)

    def report(self, scored: ClassPredictions) -> dict[str, Any]:
        return classification_report(scored, self.labels, self.metrics)
