"""Character spans: a row per word of a question's context, logits of outside and inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from ds_distill.data.batches import Examples
from ds_distill.evaluation.label_order import LabelDoubt
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.tags import IN_SPAN
from ds_distill.tasks.data import TaskData
from ds_distill.tasks.token_classification import TokenClassificationKind


class CharacterSpansKind(TokenClassificationKind):
    """Predictions are logits of all words of all windows, float32 [R, 2]."""

    def scored_words(self, examples: Examples) -> str | None:
        """A hash of the answers in all windows, and of where the words stand."""
        assert examples.words is not None
        words = examples.words.whole()[1]
        arrays = (words.answers, words.answer_offsets, words.spans, words.counted)
        return xxhash.xxh3_128_hexdigest(b"".join(of.tobytes() for of in arrays if of is not None))

    def baseline(
        self, data: TaskData, split: str, examples: Examples, references: list[ModelReference]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Every word of every context: of what can be said without reading it nothing has a better
        F1, and of the most frequent tag, which finds no span, it is 0."""
        inside = np.zeros((len(examples.labels), len(self.labels)), dtype=np.float32)
        inside[:, self.labels.index(IN_SPAN)] = 1.0
        return inside, {"answer": IN_SPAN, "rule": "the whole context", "split": split}

    def label_doubt(
        self, predictions: np.ndarray, examples: Examples, classes: Sequence[int] | None = None
    ) -> LabelDoubt | None:
        """None: nearly all words are outside, so a model that finds many answers may be right on
        fewer words than one that finds none."""
        return None
