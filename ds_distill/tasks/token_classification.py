"""Token classification: a row per word, logits over the tags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash

from ds_distill.data.batches import Examples, RowsOf
from ds_distill.data.rows import word_rows, word_token_rows
from ds_distill.data.word_windows import prepare
from ds_distill.evaluation.spans import word_predictions
from ds_distill.evaluation.words import TagPredictions
from ds_distill.models.labels import LabelMap
from ds_distill.recipe.tasks import TokenClassification
from ds_distill.tasks.data import Tokenizers
from ds_distill.tasks.kind import Codec, Vocabulary
from ds_distill.tasks.single_label import OneLabelKind


class TokenClassificationKind(OneLabelKind):
    """Predictions are logits of all words, float32 [R, C]."""

    baseline_rule = "the most frequent tag"

    def prepare(
        self, examples: datasets.Dataset, tokenizers: Tokenizers, file: Path
    ) -> datasets.Dataset:
        return prepare(examples, tokenizers(), self.settings.max_length, file)

    def rows(self, vocabulary: Vocabulary, every_token: bool) -> RowsOf:
        return word_rows

    def label_rows(self, vocabulary: Vocabulary) -> RowsOf:
        every = isinstance(self.settings, TokenClassification) and self.settings.subwords == "all"
        return word_token_rows if every else word_rows

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """A list of rows for each example, one for each word."""
        return {**super().stored(vocabulary, codec, label_map), "mask_variants": 1}

    def scored_words(self, examples: Examples) -> str | None:
        """A hash of which words are scored as a model predicts them, where some count as O: other
        models of a recipe, or another length, leave out others."""
        assert examples.words is not None
        counted = examples.words.whole()[1].counted
        return None if counted.all() else xxhash.xxh3_128_hexdigest(counted.tobytes())

    def scored(self, predictions: np.ndarray, examples: Examples) -> TagPredictions:
        known, rows = examples.where(examples.labelled)
        assert known.words is not None
        return word_predictions(predictions[rows], known.labels, known.words, self.labels)
