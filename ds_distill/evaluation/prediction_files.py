"""Predictions on disk, so that models of different runs can be compared example by example."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ds_distill.errors import UserError
from ds_distill.evaluation.answers import AnswerPredictions
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    Predictions,
    SpanPredictions,
    TagPredictions,
    TokenScores,
)
from ds_distill.files import new_file
from ds_distill.recipe.metrics.metric import Over

PREDICTIONS: dict[Over, type[Predictions]] = {
    "classes": ClassPredictions,
    "labels": LabelPredictions,
    "words": TagPredictions,
    "characters": SpanPredictions,
    "answers": AnswerPredictions,
    "numbers": NumberPredictions,
    "masked tokens": TokenScores,
}

ODD = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What comes of arrays and metadata that are not as a run writes them."""

_GROUPS = "groups"
"""Of the examples; `MODEL/FIELD` is an array of a model's predictions."""


@dataclass(frozen=True)
class SavedPredictions:
    """Of an evaluation's models, on the examples that count."""

    labels: list[str]
    """Names of the classes; none over masked tokens."""
    groups: np.ndarray
    """int64 [N], as of `paired_interval`."""
    models: Mapping[str, Predictions]
    """By name, as the metrics read them; see `ds_distill.evaluation.predictions`."""

    def write(self, file: Path) -> None:
        arrays = {
            f"{model}/{name}": np.ascontiguousarray(array)
            for model, predictions in self.models.items()
            for name, array in predictions.arrays().items()
        }
        with new_file(file) as aside:
            save_file(
                {**arrays, _GROUPS: np.ascontiguousarray(self.groups)},
                aside,
                {"labels": json.dumps(self.labels)},
            )

    @staticmethod
    def read(file: Path, over: Over) -> SavedPredictions:
        """over: of the task's metrics. Raises UserError for a file that is damaged."""
        kind, models = PREDICTIONS[over], dict[str, dict[str, np.ndarray]]()
        try:
            with safe_open(file, "np") as found:
                labels = json.loads(found.metadata()["labels"])
                groups = found.get_tensor(_GROUPS)
                for name in set(found.keys()) - {_GROUPS}:
                    model, _, field = name.rpartition("/")
                    models.setdefault(model, {})[field] = found.get_tensor(name)
            made = {model: kind.of_arrays(arrays, labels) for model, arrays in models.items()}
            for predictions in made.values():
                if len(predictions) != len(groups):
                    raise ValueError(f"{len(predictions)} examples, and {len(groups)} groups")
        except (SafetensorError, OSError, *ODD) as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(
                f"{file}: not readable: {why}. Copy the run again; where an earlier version wrote "
                "it, evaluate its student anew."
            ) from error
        return SavedPredictions(labels, groups, made)


def examples_mark(keys: np.ndarray, labels: np.ndarray, about: Any) -> str:
    """The same for evaluations that judge the same examples in the same order, and for no others.

    keys: int64 [N, 2], of the texts. labels: of the examples, as they are. about: what else decides
    what is asked of a model, JSON values.
    """
    mark = xxhash.xxh3_128()
    for array in (keys, labels):
        mark.update(f"{array.dtype}{array.shape}".encode())
        mark.update(np.ascontiguousarray(array).data)
    mark.update(json.dumps(about, sort_keys=True).encode())
    return mark.hexdigest()
