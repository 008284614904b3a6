"""What a run asks of its task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import datasets
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_distill.cache.schema import SignalSchema
from ds_distill.data.batches import Collator, RowsOf, Units, label_rows
from ds_distill.data.masking import HiddenWordsCollator
from ds_distill.data.tokenise import TokenTable
from ds_distill.engine.predict import Bar, ModelRunner
from ds_distill.evaluation.label_order import LabelDoubt, NumberDoubt
from ds_distill.evaluation.scores import build_metrics, model_report
from ds_distill.models.labels import LabelMap
from ds_distill.models.load import load_model
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.metrics.metric import Metric
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import TASKS, TaskSettings
from ds_distill.tasks.data import TaskData, Tokenizers

Settings = TypeVar("Settings", bound=TaskSettings)
Vocabulary = Callable[[], tuple[PreTrainedTokenizerBase, int]]
"""Gives the tokenizer of all models, where they have the same tokens, and below which id all know a
token."""

Codec = Callable[[int], dict[str, Any] | None]
"""Of so many entries a codec, as JSON."""

Predictions = TypeVar("Predictions")
"""A model's predictions for the N examples of a split, as far as metrics need them."""


@dataclass(frozen=True)
class PredictInputs:
    """What a runner's models are asked, and how."""

    collate: Collator
    examples: Units
    models: Sequence[str]
    batch_size: int
    """Examples per rank and forward pass."""
    bar: AbstractContextManager[Bar] | None = None
    words: Mapping[str, HiddenWordsCollator] = field(default_factory=dict)
    """By model those that it is asked for besides, see `TaskKind.hidden_words`."""


class TaskKind(ABC, Generic[Settings, Predictions]):
    """One kind of task: its head, its batches, its predictions and their scores. To add a kind,
    write these, its section and its entry (`ds_distill.recipe.tasks`). Other code asks its section
    for `rows` and `predicts`: values that no other kind has are to be added where these are
    compared."""

    def __init__(self, settings: Settings, labels: list[str]) -> None:
        """labels: names of the classes, in the order of the class ids; none where it has none."""
        self.settings, self.labels = settings, labels
        self.metrics = build_metrics(TASKS[settings.type].over, labels, settings.metric)
        """What evaluations report, by name: the task's own metric first."""

    @property
    def metric(self) -> Metric[Any]:
        """The task's metric, by which its models are compared and chosen."""
        return self.metrics[self.settings.metric.name]

    # ---------------------------------------------------------------------- models and batches

    def prepare(
        self, examples: datasets.Dataset, tokenizers: Tokenizers, file: Path
    ) -> datasets.Dataset:
        """A split's units: the examples that the source has, or where `TaskSettings.cuts` is false
        windows of them, written to a file.

        tokenizers: of all models, each once.
        """
        return examples

    def load(
        self, data: TaskData, model: str, labels: list[str], **options: Any
    ) -> PreTrainedModel:
        """A model with the task's head. Every rank must call this.

        labels: of the head's outputs, the checkpoint's own where they are not the task's; none
            where it has none.
        options: as of `load_model`.
        """
        return load_model(TASKS[self.settings.type].heads[0], model, labels or None, **options)

    def rows(self, vocabulary: Vocabulary, every_token: bool) -> RowsOf:
        """What the rows of a batch are.

        every_token: see `masked_rows`; `check` refuses terms that want it for others.
        """
        return label_rows

    def label_rows(self, vocabulary: Vocabulary) -> RowsOf:
        """The rows of a training on labels alone."""
        return self.rows(vocabulary, False)

    def examples(self, examples: Units) -> Units:
        """A split's units with labels in the task's shape."""
        return examples

    # --------------------------------------------------------------------------------- caches

    @abstractmethod
    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        """What cached signals depend on, beside model, tokenizer and length: JSON values.

        label_map: the teacher's outputs that are the task's labels; None: all, in the same order.
        """

    @abstractmethod
    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """How a cache holds a teacher's logits: fields of `SignalSchema`.

        vocabulary: tokens that the teacher knows. codec: makes the codec of distributions over so
            many entries. Every rank calls it, or none.
        """

    def signal_schema(
        self, phase: Cache, config: PreTrainedConfig, codec: Codec, label_map: LabelMap | None
    ) -> SignalSchema:
        """How a cache phase stores a teacher's signals. config: the teacher's."""
        logits = self.stored(config.vocab_size, codec, label_map)
        return SignalSchema(
            dtype=phase.dtype,
            hidden=dict.fromkeys(phase.hidden, config.hidden_size),
            temperature=phase.codec.temperature if logits.get("codec") else None,
            **logits,
        )

    # ---------------------------------------------------------------------- predictions, scores

    @abstractmethod
    def predict(self, runner: ModelRunner, inputs: PredictInputs) -> dict[str, Predictions]:
        """Predictions of a runner's models for all examples, on every rank."""

    def hidden_words(
        self,
        data: TaskData,
        examples: Units,
        tables: Mapping[str, TokenTable],
        references: Sequence[ModelReference],
        packed: Collection[str] = (),
    ) -> dict[str, HiddenWordsCollator]:
        """The words that each model is asked for besides, where the task's metric reads them or
        models of several vocabularies are compared.

        tables: by model, the examples as its own tokenizer cuts them; references: of the same.
        packed: the models that get packed views.
        """
        return {}

    @abstractmethod
    def finite(self, predictions: Predictions) -> torch.Tensor:
        """Whether a model's outputs for each row are finite: bool [R]; see `Units`."""

    def counted(self, examples: Units) -> np.ndarray:
        """Which examples metrics count: those that are labelled, once where they are several
        windows; bool [N]."""
        return examples.is_first & examples.labelled

    def labels_of(self, examples: Units) -> np.ndarray:
        """The labels of examples, by which evaluations tell whether they are of the same ones."""
        return examples.labels

    def scored_words(self, examples: Units) -> Any:
        """Which words of a split are scored, where keys and labels of the examples that count say
        not all: JSON values."""
        return None

    @abstractmethod
    def scored(self, predictions: Predictions, examples: Units) -> Any:
        """Predictions for the examples that count, as the task's metrics read them; see
        `ds_distill.evaluation.predictions`."""

    def report(self, scored: Any) -> dict[str, Any]:
        """See `ds_distill.evaluation.scores.model_report`: JSON values."""
        return model_report(scored, self.metrics, self.labels)

    @abstractmethod
    def baseline(
        self, data: TaskData, split: str, examples: Units, references: list[ModelReference]
    ) -> tuple[Predictions, dict[str, Any]]:
        """What is right without reading a text, as predictions for a split, and its description:
        `answer`, by which `rule`, and the `split` that it comes from. Every rank must call this.

        references: the models that are evaluated.
        """

    def label_doubt(
        self, predictions: Predictions, examples: Units, classes: Sequence[int] | None = None
    ) -> LabelDoubt | NumberDoubt | None:
        """Whether a model's labels may be in another order than the task's, or its numbers on
        another scale.

        classes: class ids that a partial teacher knows, on whose examples alone it is judged. What
            is returned is of them: `LabelDoubt.order` numbers them from 0.
        """
        return None
