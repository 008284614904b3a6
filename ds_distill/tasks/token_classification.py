"""Token classification: a row per word, logits over the tags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import datasets
import numpy as np
import xxhash
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_distill.cache.schema import SignalSchema
from ds_distill.data.batches import (
    CachedSignals,
    Collator,
    Examples,
    WordCollator,
    WordTokenCollator,
)
from ds_distill.data.text_windows import prepare
from ds_distill.data.tokenise import TokenTable
from ds_distill.evaluation.scores import metric_values, reliability
from ds_distill.evaluation.words import TagPredictions, word_report
from ds_distill.models.labels import LabelMap
from ds_distill.models.load import load_token_classifier
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import TokenClassification
from ds_distill.tasks.data import TaskData
from ds_distill.tasks.single_label import OneLabelKind


class TokenClassificationKind(OneLabelKind):
    """Predictions are logits of all words, float32 [R, C]."""

    baseline_rule = "the most frequent tag"

    def prepare(
        self,
        examples: datasets.Dataset,
        tokenizers: Callable[[], list[PreTrainedTokenizerBase]],
    ) -> datasets.Dataset:
        return prepare(examples, tokenizers(), self.settings.max_length)

    def load(
        self, data: TaskData, model: str, labels: list[str], **options: Any
    ) -> PreTrainedModel:
        return load_token_classifier(model, labels, **options)

    def collator(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        vocabulary: Callable[[], tuple[PreTrainedTokenizerBase, int]],
        cached: CachedSignals | None,
        packed: Collection[str],
        every_token: bool,
    ) -> Collator:
        return WordCollator(examples, tables, cached, packed)

    def collator_of_labels(
        self, examples: Examples, tables: Mapping[str, TokenTable]
    ) -> Collator | None:
        every = isinstance(self.settings, TokenClassification) and self.settings.subwords == "all"
        return WordTokenCollator(examples, tables) if every else None

    def signal_schema(
        self,
        phase: Cache,
        config: PreTrainedConfig,
        codec: Callable[[int], dict[str, Any] | None],
        label_map: LabelMap | None,
    ) -> SignalSchema:
        """A list of rows for each example, one for each word."""
        schema = super().signal_schema(phase, config, codec, label_map)
        return schema.model_copy(update={"mask_variants": 1})

    def counted(self, examples: Examples) -> np.ndarray:
        """The first window of each text that has tags."""
        assert examples.words is not None
        first = np.zeros(len(examples), dtype=bool)
        first[examples.words.firsts] = True
        return first & examples.labelled

    def asked(self, examples: Examples) -> str | None:
        """A hash of which words are scored as a model predicts them, where some count as O: other
        models of a recipe, or another length, leave out others."""
        assert examples.words is not None
        counted = examples.words.whole()[1].counted
        return None if counted.all() else xxhash.xxh3_128_hexdigest(counted.tobytes())

    def scored(self, predictions: np.ndarray, examples: Examples) -> TagPredictions:
        known = examples.at(np.flatnonzero(examples.labelled))
        rows = examples.rows_of(np.flatnonzero(examples.labelled))
        assert known.words is not None
        own, words = known.words.whole()
        return TagPredictions(predictions[rows[own]], known.labels[own], words, self.labels)

    def report(self, scored: Any) -> dict[str, Any]:
        """Confidence is that of words that count."""
        counted = scored.words.counted
        right = (scored.predicted == scored.labels)[counted]
        return {
            **word_report(scored),
            **metric_values(scored, self.metrics),
            "per_class": scored.per_class(self.labels),
            "reliability": reliability(scored.confidence[counted], right),
        }
