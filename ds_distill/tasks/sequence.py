"""What kinds of task share whose predictions are logits of an example or of its words."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from ds_distill.data.batches import Collator, Examples, RowsOf
from ds_distill.data.labels import is_labelled
from ds_distill.data.rows import text_rows
from ds_distill.engine.predict import Bar, ModelRunner, predict_all
from ds_distill.tasks.data import TaskData
from ds_distill.tasks.kind import Settings, TaskKind, Vocabulary


class SequenceKind(TaskKind[Settings, np.ndarray]):
    """Predictions are logits, float32 [R, C]: of classes or labels, or the one output."""

    def rows(self, vocabulary: Vocabulary, every_token: bool) -> RowsOf:
        return text_rows

    def predict(
        self,
        runner: ModelRunner,
        collate: Collator,
        examples: Examples,
        models: Sequence[str],
        batch_size: int,
        bar: AbstractContextManager[Bar] | None = None,
    ) -> dict[str, np.ndarray]:
        outputs = predict_all(runner, collate, examples, models, batch_size, bar)
        count = len(self.labels)
        return {model: signals.over_all(count).numpy() for model, signals in outputs.items()}

    def finite(self, predictions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.isfinite(predictions).all(axis=1))

    def training_labels(self, data: TaskData, examples: Examples) -> tuple[str, np.ndarray]:
        """The labels of train, each once, and its name; where it has none, those of the evaluated
        examples: no constant answer is right more often."""
        if data.has_split("train") and len(labels := _known_labels(data.examples("train"))):
            return "train", labels
        return "the evaluated split", _known_labels(examples)


def _known_labels(examples: Examples) -> np.ndarray:
    """Of words that are in several windows one."""
    labels = examples.labels
    if examples.words is not None:
        labels = labels[examples.words.whole()[0]]
    return labels[is_labelled(labels)]
